"""Accounting of jobs and devices, during a simulation and at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.fill.types import JobState
from megatron.fill.wings.sim.cluster.progress import SimulatedAttempt
from megatron.fill.wings.sim.values import DeviceGroup, FillKind, GroupOutcome, JobOutcome, MainJobRun, SimJob


@dataclass(slots=True)
class JobEntry:
    """A job.  ``kept`` is the saved work, which no failure can undo."""

    job: SimJob
    state: JobState = JobState.QUEUED
    started_s: float | None = None
    ended_s: float | None = None
    kept: float = 0.0
    device_s: float = 0.0
    attempts: int = 0
    present: SimulatedAttempt | None = None

    def outcome(self) -> JobOutcome:
        return JobOutcome(
            self.job.id, self.state, self.started_s, self.ended_s, self.kept, self.device_s, self.attempts
        )


@dataclass(slots=True)
class MainEntry:
    """A main job.

    Attributes:
        first, last: range of its devices' numbers; ``last`` is excluded.
        since_s: time of the last start or stop; None before its first start and after its end.
        token: number of starts and stops.
        up_s, down_s: seconds up and down, of one device.
    """

    run: MainJobRun
    first: int
    last: int
    up: bool = False
    since_s: float | None = None
    token: int = 0
    up_s: float = 0.0
    down_s: float = 0.0

    def change(self, up: bool, since_s: float | None, now_s: float) -> None:
        """Account for the time until ``now_s``; ``since_s`` is None if the main job has ended."""
        if self.since_s is not None:
            if self.up:
                self.up_s += now_s - self.since_s
            else:
                self.down_s += now_s - self.since_s
        self.up, self.since_s = up, since_s
        self.token += 1


@dataclass(slots=True)
class GroupEntry:
    """The use of a group of devices, in device seconds."""

    group: DeviceGroup
    main: MainEntry
    resident_s: float = 0.0
    tail_s: float = 0.0
    alone_s: float = 0.0

    def outcome(self) -> GroupOutcome:
        group, main = self.group, self.main
        main_s = main.up_s * group.count
        return GroupOutcome(
            name=group.name,
            count=group.count,
            main_s=main_s,
            bubble_s=main_s * group.cycle.bubble_ns / group.cycle.period_ns,
            down_s=main.down_s * group.count,
            resident_s=self.resident_s,
            tail_s=self.tail_s,
            alone_s=self.alone_s,
        )


class Ledger:
    """Accounts for attempts when they end.

    Args:
        jobs: entries in the order of the scenario.
    """

    def __init__(self, jobs: Sequence[JobEntry], groups: Sequence[GroupEntry], kinds: Mapping[str, FillKind]) -> None:
        self.jobs = jobs
        self.groups = groups
        self._kinds = kinds

    def close(self, attempt: SimulatedAttempt, group: int, now_s: float, kept: float) -> None:
        """Account for an attempt that has ended; ``kept`` is the job's saved work from now on."""
        entry, place = self.jobs[attempt.job], self.groups[group]
        seconds = now_s - attempt.claimed_s
        entry.device_s += seconds
        place.alone_s += (kept - entry.kept) / self._kinds[entry.job.kind].alone_rate
        entry.kept, entry.present = kept, None
        if attempt.tail:
            place.tail_s += seconds
        else:
            place.resident_s += seconds
