"""How much of each bubble to fill on a device that does not preempt: a part of ``sim_pipefill.py``.

The passes of a main job vary from iteration to iteration.  Each bubble is filled up to a share of the length that it
has on average, by the runtime's own step loop in virtual time.  A step that runs on after its bubble holds its rank up,
and so the ranks that wait for it: the iteration is timed again with these delays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np

from megatron.fill.pages.gate import OpenBubble
from megatron.fill.pipeline.costs import PipelineCosts
from megatron.fill.pipeline.timeline import Compiled, Timeline
from megatron.fill.profiles import JobProfile
from megatron.fill.rank.rule import FillRule
from megatron.fill.types import Bubble, CycleKey
from megatron.fill.wings.sim.cluster.rates import Rates
from megatron.fill.wings.sim.filljobs.catalog import CATALOG, catalog_kinds
from megatron.fill.wings.sim.mainjob import MainJob
from megatron.fill.wings.sim.sweep import run_all
from megatron.fill.wings.sim.values import FillKind, RuntimeModel
from scripts.benchmarks.studies.bubbles import physical_job
from scripts.benchmarks.studies.truth.replay import Opened, PlayedIteration, open_bubbles, replay
from scripts.benchmarks.studies.truth.steps import StepTimes

SHARES = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
NOISES = (0.01, 0.03, 0.1)
ITERATIONS = 40
STEP_NOISE = 0.02
WAKE_NS = 130_000
_LEAST_STEPS = 1000

type Delays = list[list[list[int]]]  # by iteration, stage and wait, in ns


@dataclass(frozen=True, slots=True)
class StageJob:
    """The fill job of one stage: its kind, and its profile in the configuration that the planner chooses there."""

    kind: FillKind
    profile: JobProfile

    @property
    def flops(self) -> float:
        """Per unit of work: of a forward pass, and for training of a backward pass twice that."""
        workload = CATALOG[self.kind.name]
        return sum(block.flops for block in workload.model.blocks) * (3 if workload.training else 1)


def stage_jobs(job: MainJob, runtime: RuntimeModel) -> list[StageJob]:
    """One kind after the other, over the stages."""
    found = []
    for stage, cycle in enumerate(job.cycles()):
        kinds = {kind.name: kind for kind in catalog_kinds(job.gpu)}
        fits = Rates(cycle, list(kinds.values()), runtime).whole.fits
        fit = fits[list(fits)[stage % len(fits)]]
        found.append(StageJob(kinds[fit.kind], fit.profile))
    return found


class Iterations:
    """Iterations of a main job whose passes vary, without any filling.

    Args:
        noise: of the passes: standard deviation over mean.
    """

    def __init__(self, job: MainJob, number: int, noise: float, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.costs: PipelineCosts = job.costs()
        self.key = CycleKey(job.schedule.name, job.schedule.microbatches)
        self._compiled = Compiled(job.schedule, job.rendezvous)
        mean = self._compiled.durations(self.costs)
        self._durations = [
            [[max(0, round(ns * random.normal(1.0, noise))) for ns in row] for row in mean] for _ in range(number)
        ]
        self.timelines = [self._compiled.run(self.costs, one, empty=True) for one in self._durations]

    @property
    def time_ns(self) -> int:
        """Of all iterations."""
        return sum(timeline.period_ns for timeline in self.timelines)

    def stage(self, stage: int) -> list[PlayedIteration]:
        """One stage's waits, on the clock of the whole run."""
        rows, start_ns = [], 0
        for number, timeline in enumerate(self.timelines, 1):
            rows.append(PlayedIteration(number, start_ns, timeline.waits[stage]))
            start_ns += timeline.period_ns
        return rows

    def no_delays(self) -> Delays:
        return [[[0] * len(row) for row in timeline.waits] for timeline in self.timelines]

    def delayed(self, delays: Delays) -> list[Timeline]:
        """The iterations with some waits prolonged; what follows the last wait of one is the next one's optimizer."""
        found = []
        late_ns = [0] * self.costs.ranks
        for durations, delay in zip(self._durations, delays, strict=True):
            optimizer_ns = tuple(ns + late for ns, late in zip(self.costs.optimizer_ns, late_ns, strict=True))
            transfers = [[self.costs.p2p_ns + ns for ns in row[:-1]] for row in delay]
            found.append(self._compiled.run(replace(self.costs, optimizer_ns=optimizer_ns), durations, transfers))
            late_ns = [row[-1] for row in delay]
        return found


def open_shares(rows: Sequence[PlayedIteration], share: float, least_ns: int = FillRule().min_bubble_ns) -> Opened:
    """Every bubble open for a share of what it takes on average; those where that is too short stay shut."""
    means_ns = [fmean(wait.duration_ns for wait in its) for its in zip(*(row.waits for row in rows), strict=True)]
    bubbles: list[Bubble] = []
    told: dict[int, OpenBubble] = {}
    for row in rows:
        for index, wait in enumerate(row.waits):
            length_ns = round(share * means_ns[index])
            start_ns, end_ns = row.start_ns + wait.start_ns, row.start_ns + wait.end_ns
            seq = len(told) + 1 if length_ns >= least_ns else 0
            if seq:
                told[seq] = OpenBubble(seq, start_ns, start_ns + length_ns, 0)
            bubbles.append(Bubble(row.iteration, index, wait.kind, start_ns, end_ns, length_ns, seq, filling=True))
    return Opened(bubbles, told)


def steps_of(profile: JobProfile, noise: float, seed: int) -> StepTimes:
    """A job's nodes again and again, each time a little longer or shorter."""
    random = np.random.default_rng(seed)
    nodes_ns = tuple(max(1, node.duration_ns) for node in profile.nodes)
    times = -(-_LEAST_STEPS // len(nodes_ns))
    steps = np.array(nodes_ns * times) * random.lognormal(0.0, noise, len(nodes_ns) * times)
    return StepTimes(
        tuple(max(1, round(ns)) for ns in steps.tolist()),
        (WAKE_NS,),
        work=profile.work / len(nodes_ns),
        profile_ns=nodes_ns,
    )


def fill(job: MainJob, runs: Iterations, jobs: Sequence[StageJob], share: float | None) -> dict[str, Any]:
    """Fill the bubbles of every stage up to a share, or with None by the runtime's own rule."""
    delays, rule = runs.no_delays(), FillRule(stages=job.parallel.pp)
    bubble_ns = harvested_ns = opens = overruns = 0
    alone_s = flops = 0.0
    for stage, its in enumerate(jobs):
        rows = runs.stage(stage)
        opened = open_bubbles(rows, runs.key, rule) if share is None else open_shares(rows, share)
        done = replay(opened, steps_of(its.profile, STEP_NOISE, stage), preemptive=False)
        by_seq = {bubble.seq: bubble for bubble in opened.bubbles}
        for use in done.uses:
            bubble = by_seq[use.seq]
            delays[bubble.iteration - 1][stage][bubble.index] = use.overrun_ns
            overruns += use.overrun_ns > 0
        opens += len(opened.told)
        bubble_ns += sum(bubble.end_ns - bubble.start_ns for bubble in opened.bubbles)
        harvested_ns += sum(use.harvested_ns for use in done.uses)
        alone_s += done.work_done / its.kind.alone_rate
        flops += done.work_done * its.flops
    time_s = sum(timeline.period_ns for timeline in runs.delayed(delays)) / 1e9
    per_stage = job.parallel.tp * job.parallel.dp
    main = job.model.model_flops(job.parallel.global_batch * job.model.sequence) * len(runs.timelines)
    return {
        "share": share,
        "slowdown": time_s / (runs.time_ns / 1e9) - 1,
        "harvested_share": harvested_ns / bubble_ns,
        "overrun_share": overruns / max(1, opens),
        "main_tflops": main / time_s / job.gpus / 1e12,
        "fill_tflops": flops * per_stage / time_s / job.gpus / 1e12,
        "gpus_worth": alone_s * per_stage / time_s,
    }


def filled_shares(runtime: RuntimeModel) -> list[dict[str, Any]]:
    """A row per noise and share, and for each noise one by the runtime's own rule."""
    cases = [(noise, share, runtime) for noise in NOISES for share in (*SHARES, None)]
    return run_all(_case, cases)


def _case(case: tuple[float, float | None, RuntimeModel]) -> dict[str, Any]:
    noise, share, runtime = case
    job = physical_job()
    found = fill(job, Iterations(job, ITERATIONS, noise), stage_jobs(job, runtime), share)
    return {"noise": noise, **found}


def share_below(rows: Sequence[dict[str, Any]], noise: float, slowdown: float) -> float | None:
    """The largest share up to which none slows the main job down by as much as that; None if the first one does."""
    found = None
    shares = [row for row in rows if row["noise"] == noise and row["share"] is not None]
    for row in sorted(shares, key=itemgetter("share")):
        if row["slowdown"] >= slowdown:
            break
        found = row["share"]
    return found
