"""From the outcome of a simulation to the answers that a person wants.

*GPUs' worth* is the fill work done, in GPUs: how many devices with nothing else to do would have done as much in the
same time.  A ratio that cannot be known is None, never NaN.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron.fill.sim.values import GroupOutcome, JobOutcome, Scenario, SimJob, SimOutcome
from megatron.fill.types import JobState

_DAY_H = 24.0


@dataclass(frozen=True, slots=True)
class Completion:
    """Times from arrival to success, in seconds.

    Attributes:
        count: of jobs that succeeded.
    """

    count: int
    mean_s: float
    median_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class UseOfTime:
    """Where the time of some devices went, as shares of all of it; ``idle`` is time without a main job.

    Attributes:
        main: the main job computed.
        fill: done by fill jobs: what the work would have taken alone.
        bubble: bubbles, as a share of the main job's time; None without a main job.
        gpus_worth: of the fill work.
    """

    name: str
    devices: int
    main: float
    fill: float
    down: float
    idle: float
    bubble: float | None
    gpus_worth: float

    @property
    def gain(self) -> float | None:
        """How much more work the devices do than the main job alone."""
        return self.fill / self.main if self.main > 0 else None


@dataclass(frozen=True, slots=True)
class JobKindResult:
    """How the jobs of one kind fared."""

    kind: str
    jobs: int
    succeeded: int
    failed: int
    work_done: float
    unit: str
    gpus_worth: float
    completion: Completion | None


@dataclass(frozen=True, slots=True)
class SimResult:
    """One simulated scenario.

    Attributes:
        what: the values of a sweep that make it different from the others, such as ``{"dp": 16}``.
        completion: of the jobs that succeeded; None if none did.
        deadlines: of jobs with a deadline, how many there were and how many were met.
        saved_per_day: what the fill work would have cost on devices of its own; None without a price.
        truncated: jobs that were still waiting or running at the end, so that completion times lean to the short ones.
    """

    policy: str
    what: dict[str, Any]
    duration_s: float
    total: UseOfTime
    groups: tuple[UseOfTime, ...]
    kinds: tuple[JobKindResult, ...]
    jobs: dict[str, int]
    completion: Completion | None
    deadlines: tuple[int, int]
    saved_per_day: float | None
    truncated: int
    failures: int
    events: int
    wall_s: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        data = asdict(self)
        for use, entry in zip((self.total, *self.groups), (data["total"], *data["groups"]), strict=True):
            entry["gain"] = use.gain
        return data


def short_names(fields: Iterable[str]) -> dict[str, str]:
    """For each swept field its last name, or the whole path where that would not tell it from another."""
    lasts = {field: field.rpartition(".")[2] for field in fields}
    return {field: last if list(lasts.values()).count(last) == 1 else field for field, last in lasts.items()}


def summarise(
    scenario: Scenario, outcome: SimOutcome, price_per_gpu_hour: float | None = None, what: dict[str, Any] | None = None
) -> SimResult:
    """The answers of one simulation.

    Args:
        price_per_gpu_hour: of a device like those of the main job, in any currency.
        what: kept in the result.
    """
    total = _use("all", outcome.groups, outcome.duration_s)
    pairs = list(zip(scenario.jobs, outcome.jobs, strict=True))
    states = dict.fromkeys((str(state) for state in JobState if state is not JobState.CANCELLED), 0)
    for _, ended in pairs:
        states[ended.state] += 1
    due = [(job, ended) for job, ended in pairs if job.deadline_s is not None]
    return SimResult(
        policy=scenario.policy,
        what=what or {},
        duration_s=outcome.duration_s,
        total=total,
        groups=tuple(_use(group.name, [group], outcome.duration_s) for group in outcome.groups),
        kinds=_kinds(scenario, pairs, outcome.duration_s),
        jobs=states,
        completion=_completion(pairs),
        deadlines=(len(due), sum(_in_time(job, ended) for job, ended in due)),
        saved_per_day=None if price_per_gpu_hour is None else total.gpus_worth * _DAY_H * price_per_gpu_hour,
        truncated=states[JobState.QUEUED] + states[JobState.RUNNING],
        failures=outcome.failures,
        events=outcome.events,
        wall_s=outcome.wall_s,
    )


def _use(name: str, groups: Sequence[GroupOutcome], duration_s: float) -> UseOfTime:
    devices = sum(group.count for group in groups)
    all_s = devices * duration_s
    main_s, bubble_s = sum(group.main_s for group in groups), sum(group.bubble_s for group in groups)
    down_s, alone_s = sum(group.down_s for group in groups), sum(group.alone_s for group in groups)
    return UseOfTime(
        name=name,
        devices=devices,
        main=(main_s - bubble_s) / all_s,
        fill=alone_s / all_s,
        down=down_s / all_s,
        idle=max(0.0, 1 - (main_s + down_s) / all_s),
        bubble=bubble_s / main_s if main_s > 0 else None,
        gpus_worth=alone_s / duration_s,
    )


def _kinds(
    scenario: Scenario, pairs: Iterable[tuple[SimJob, JobOutcome]], duration_s: float
) -> tuple[JobKindResult, ...]:
    by_kind: defaultdict[str, list[tuple[SimJob, JobOutcome]]] = defaultdict(list)
    for job, ended in pairs:
        by_kind[job.kind].append((job, ended))
    found = []
    for kind in scenario.kinds:
        its = by_kind[kind.name]
        work = sum(ended.work_done for _, ended in its)
        succeeded = sum(ended.state is JobState.SUCCEEDED for _, ended in its)
        failed = sum(ended.state is JobState.FAILED for _, ended in its)
        worth = work / kind.alone_rate / duration_s
        found.append(JobKindResult(kind.name, len(its), succeeded, failed, work, kind.unit, worth, _completion(its)))
    return tuple(found)


def _completion(pairs: Iterable[tuple[SimJob, JobOutcome]]) -> Completion | None:
    times = [ended.ended_s - job.arrival_s for job, ended in pairs if ended.ended_s is not None]
    if not times:
        return None
    median, p95 = np.percentile(times, [50, 95])
    return Completion(len(times), float(np.mean(times)), float(median), float(p95))


def _in_time(job: SimJob, ended: JobOutcome) -> bool:
    return ended.ended_s is not None and job.deadline_s is not None and ended.ended_s <= job.deadline_s
