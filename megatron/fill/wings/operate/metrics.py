"""The metrics of a run on one node, from its records, control pages and store, in Prometheus' data model.

Every family is there from the start, and labels are bounded: stages, kinds of bubbles, states, causes, and the users
with the most jobs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from megatron.fill.errors import ControlError, StoreError
from megatron.fill.pages.control import ControlPage, RunState
from megatron.fill.pages.find import find_pages
from megatron.fill.records.live import LiveRank, LiveSegment
from megatron.fill.records.sampling import Sample
from megatron.fill.records.segment import last_segment
from megatron.fill.store import JobStore, open_store
from megatron.fill.types import BubbleKind, JobState
from megatron.fill.wings.operate.spec import MetricsSpec

_S = 1e9
_MOST_USERS = 20  # users with a label of their own; the others are one
_FRESH_S = 1.0  # age up to which ``RunMetrics.family`` uses again what was collected
_OTHERS = "others"
_WAITING = (JobState.QUEUED, JobState.RUNNING)


class RunMetrics:
    """A collector for a Prometheus registry, for any thread: the metrics are collected by one at a time.

    Args:
        sample: one iteration of so many is sampled; 0 for none.
    """

    def __init__(self, spec: MetricsSpec, sample: int = 0) -> None:
        self._spec = spec
        self._live = LiveSegment(last_segment(Path(spec.run_dir)), [spec.node], sample)
        self._pages: list[ControlPage] = []
        self._store: JobStore | None = None
        self._lock = threading.Lock()
        self._at_s = -_FRESH_S
        self._families: dict[str, Metric] = {}

    def collect(self) -> list[Metric]:
        """Return all families."""
        with self._lock:
            self._live.look()
            ranks = list(self._live.ranks.values())
            of_ranks = _of_bubbles(ranks), self._of_slowdown(ranks), _of_attempts(ranks)
            return list(chain(*of_ranks, self._of_pages(), self._of_store()))

    def family(self, name: str) -> Metric:
        """Return a family, which may be a second old; for one thread."""
        if time.monotonic() - self._at_s > _FRESH_S:
            self._families = {family.name: family for family in self.collect()}
            self._at_s = time.monotonic()
        return self._families[name]

    def samples(self) -> list[tuple[LiveRank, Sample]]:
        """Return the sampled iterations that are new, with their ranks."""
        with self._lock:
            self._live.look()
            return list(self._live.samples())

    def _of_slowdown(self, ranks: list[LiveRank]) -> Iterator[Metric]:
        slowdown = GaugeMetricFamily(
            "pipefill_slowdown_ratio",
            "Slowdown of the training by filling, and the ends of its 95% interval; 0.01 is 1%.",
            labels=["bound"],
        )
        if (measured := self._live.slowdown) is not None:
            for bound, value in zip(("mean", "lower", "upper"), measured[:3], strict=True):
                slowdown.add_metric([bound], value)
        yield slowdown
        stops = max((len(rank.brakes) for rank in ranks), default=0)
        yield CounterMetricFamily("pipefill_brakes", "Stops of the filling by the automatic brake.", value=stops)
        engaged = any(rank.brakes and rank.iteration < rank.brakes[-1].until for rank in ranks)
        yield GaugeMetricFamily("pipefill_brake_engaged", "1 while the brake keeps filling off.", value=float(engaged))

    def _of_pages(self) -> Iterator[Metric]:
        try:
            self._pages = find_pages(Path(self._spec.run_dir), self._pages)
        except ControlError:  # no rank is found
            self._pages = []
        states = GaugeMetricFamily("pipefill_ranks", "Ranks on this node by the state of filling.", labels=["state"])
        for state in RunState:
            states.add_metric([state.name.lower()], sum(page.state is state for page in self._pages))
        yield states
        alive = sum(page.agent_lives for page in self._pages)
        yield GaugeMetricFamily("pipefill_agents", "Agents on this node that are alive.", value=alive)

    def _of_store(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("pipefill_jobs", "Unfinished jobs in the store.", labels=["state", "user"])
        age = GaugeMetricFamily("pipefill_queue_age_seconds", "Time since the oldest queued job was submitted.")
        up = GaugeMetricFamily("pipefill_store_up", "1 if the job store answers.")
        if self._spec.store:
            try:
                self._add_jobs(jobs, age)
                up.add_metric([], 1)
            except StoreError:
                self._store = None
                up.add_metric([], 0)
        yield from (jobs, age, up)

    def _add_jobs(self, jobs: Metric, age: GaugeMetricFamily) -> None:
        if self._store is None:
            self._store = open_store(self._spec.store, create=False)
        found = self._store.list(_WAITING)
        most = {user for user, _ in Counter(job.user for job in found).most_common(_MOST_USERS)}
        counted = Counter((job.state, job.user if job.user in most else _OTHERS) for job in found)
        for (state, user), count in sorted(counted.items()):
            jobs.add_sample(jobs.name, {"state": state.lower(), "user": user}, count)
        waiting = [job.submitted_s for job in found if job.state is JobState.QUEUED]
        age.add_metric([], max(0.0, self._store.now_s() - min(waiting)) if waiting else 0.0)


def _of_bubbles(ranks: list[LiveRank]) -> Iterator[Metric]:
    bubbles = CounterMetricFamily(
        "pipefill_bubble_seconds", "Time in bubbles of training iterations and saves.", labels=["stage", "kind"]
    )
    sums = {
        "pipefill_fillable_seconds": ("Time in bubbles while filling was on.", lambda its: its.fillable_ns / _S),
        "pipefill_harvested_seconds": ("Time inside steps of jobs and bubbles.", lambda its: its.harvested_ns / _S),
        "pipefill_overrun_seconds": ("Time that steps ran on after bubbles.", lambda its: its.overrun_ns / _S),
        "pipefill_overruns": ("Bubbles after which a step ran on.", lambda its: its.overruns),
        "pipefill_steps": ("Steps of jobs.", lambda its: its.steps),
        "pipefill_iteration_seconds": ("Time in iterations that were watched.", lambda its: its.watched_ns / _S),
    }
    stages = sorted({rank.info.stage for rank in ranks})
    for stage in stages:
        for kind in BubbleKind:
            total = sum(rank.bubble_ns[kind] for rank in ranks if rank.info.stage == stage)
            bubbles.add_metric([str(stage), kind], total / _S)
    yield bubbles
    for name, (text, value) in sums.items():
        family = CounterMetricFamily(name, text, labels=["stage"])
        for stage in stages:
            family.add_metric([str(stage)], sum(value(rank) for rank in ranks if rank.info.stage == stage))
        yield family
    done = max((rank.iterations for rank in ranks), default=0)
    yield CounterMetricFamily("pipefill_iterations", "Training iterations since this start.", value=done)
    last = GaugeMetricFamily("pipefill_last_iteration_timestamp_seconds", "Unix time of the last iteration's end.")
    if done:
        since_s = (time.monotonic_ns() - max(rank.ended_ns for rank in ranks)) / _S
        last.add_metric([], time.time() - since_s)
    yield last


def _of_attempts(ranks: list[LiveRank]) -> Iterator[Metric]:
    attempts = CounterMetricFamily(
        "pipefill_attempts", "Attempts at jobs that ended, by their job's state then.", labels=["state", "cause"]
    )
    for (state, cause), count in sorted(sum((rank.ended for rank in ranks), Counter()).items()):
        attempts.add_metric([state.lower(), cause], count)
    yield attempts
    peak = GaugeMetricFamily(
        "pipefill_job_memory_peak_bytes", "Peak device memory seen of the jobs that run.", labels=["rank"]
    )
    running = GaugeMetricFamily("pipefill_jobs_running", "Jobs that run on this node.")
    for rank in ranks:
        peak.add_metric([str(rank.info.rank)], sum(job.peak_bytes for job, _ in rank.running))
    running.add_metric([], sum(len(rank.running) for rank in ranks))
    yield from (peak, running)
