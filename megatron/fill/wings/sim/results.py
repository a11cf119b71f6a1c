"""Summaries of a simulation's outcome.

*GPUs' worth* is the fill work done, in GPUs: the number of otherwise idle devices that would have done as much in the
same time.  An undefined ratio is None, never NaN.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron.fill.types import JobState
from megatron.fill.wings.sim.values import GroupOutcome, JobOutcome, Scenario, SimJob, SimOutcome

_DAY_H = 24.0


@dataclass(frozen=True, slots=True)
class Completion:
    """Times from arrival to success, in seconds."""

    count: int  # number of jobs that succeeded
    mean_s: float
    median_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class UseOfTime:
    """The use of some devices' time, as shares of the total; ``idle`` is time without a main job."""

    name: str
    devices: int
    main: float  # share in which the main job computed
    fill: float  # time that the fill jobs' work would have taken alone
    down: float
    idle: float
    bubble: float | None  # bubbles' share of the main job's time; None without a main job
    gpus_worth: float  # GPUs' worth of the fill work

    @property
    def unused(self) -> float:
        """Share of bubbles that were not used, or lost."""
        return max(0.0, 1 - self.main - self.fill - self.down - self.idle)

    @property
    def gain(self) -> float | None:
        """Fill work relative to the main job's work; None without a main job."""
        return self.fill / self.main if self.main > 0 else None


@dataclass(frozen=True, slots=True)
class JobKindResult:
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
    """The results of a simulated scenario."""

    policy: str
    what: dict[str, Any]  # swept values that distinguish it from the others, such as ``{"dp": 16}``
    duration_s: float
    total: UseOfTime
    groups: tuple[UseOfTime, ...]
    kinds: tuple[JobKindResult, ...]
    jobs: dict[str, int]
    completion: Completion | None  # completion times of the jobs that succeeded; None if none did
    deadlines: tuple[int, int]  # number of jobs with a deadline, and number of deadlines met
    saved_per_day: float | None  # cost of the fill work on dedicated devices, per day; None without a price
    truncated: int  # number of jobs still waiting or running at the end; many bias completion times towards short jobs
    failures: int
    events: int
    wall_s: float

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        for use, entry in zip((self.total, *self.groups), (data["total"], *data["groups"]), strict=True):
            entry["gain"] = use.gain
        return data


def short_names(fields: Iterable[str]) -> dict[str, str]:
    """Return each swept field's last name, or its whole path if the last name is not unique."""
    lasts = {field: field.rpartition(".")[2] for field in fields}
    return {field: last if list(lasts.values()).count(last) == 1 else field for field, last in lasts.items()}


def summarise(
    scenario: Scenario, outcome: SimOutcome, price_per_gpu_hour: float | None = None, what: dict[str, Any] | None = None
) -> SimResult:
    """Summarise a simulation's outcome, with a price of a GPU-hour in any currency, and the swept values ``what``."""
    total = _use("all", outcome.groups, outcome.duration_s)
    pairs = list(zip(scenario.jobs, outcome.jobs, strict=True))
    states = dict.fromkeys((str(state) for state in JobState if state is not JobState.CANCELLED), 0)
    for _, ended in pairs:
        states[ended.state] += 1
    due = [(job.deadline_s, ended.ended_s) for job, ended in pairs if job.deadline_s is not None]
    return SimResult(
        policy=scenario.policy,
        what=what or {},
        duration_s=outcome.duration_s,
        total=total,
        groups=tuple(_use(group.name, [group], outcome.duration_s) for group in outcome.groups),
        kinds=_kinds(scenario, pairs, outcome.duration_s),
        jobs=states,
        completion=_completion(pairs),
        deadlines=(len(due), sum(ended_s is not None and ended_s <= deadline_s for deadline_s, ended_s in due)),
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
