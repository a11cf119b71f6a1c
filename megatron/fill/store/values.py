"""The values that a job store takes and returns.  Times are seconds since the epoch (``_s``)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megatron.fill.status import JobState, Status
from megatron.fill.work import Work


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a job, as last reported by the agent that holds it."""

    work_done: float = 0.0  # work done in ``unit``, over all attempts that count
    total_work: float | None = None  # None if the task did not report it
    unit: str = "steps"
    rate: float | None = None  # recent work per second of wall-clock time; None if unknown
    steps: int = 0
    harvested_s: float = 0.0  # time spent in steps, in bubbles or while no training had the device
    checkpoint_s: float | None = None  # time of the last save; None for never
    resumable: bool = False  # True if the task reports that it can be saved and resumed elsewhere
    startup_s: float | None = None  # time that its current worker took until it could serve bubbles; None before that
    failures: int = 0  # number of failures after which it was put back into the queue
    joules: float | None = None  # its part of the device's energy, by time; None where no device had a counter


@dataclass(frozen=True, slots=True)
class Job:
    """A job in the store; further attributes as in ``NewJob``."""

    id: int
    name: str
    work: Work
    user: str
    priority: int
    deadline_s: float | None
    status: Status
    submitted_s: float
    started_s: float | None  # time of the last claim; None for never
    finished_s: float | None  # None before it has finished
    attempt: int  # number of claims so far
    owner: str | None  # agent that holds it; None unless RUNNING
    lease_until_s: float | None  # None unless RUNNING
    cancelling: bool  # True if its cancellation was requested while it ran
    device: str  # device that it runs on or last ran on: ``rank 1 of runs/first on host``
    directory: str  # absolute path of its folder; empty before it was first placed
    progress: Progress
    result: dict[str, Any] = field(default_factory=dict)
    asked_by: str = ""  # device that has asked for it since its last claim; empty for none
    asked_s: float | None = None  # time at which a device last asked for it; None for never

    @property
    def state(self) -> JobState:
        return self.status.state

    @property
    def reason(self) -> str:
        """The cause of its state, as text."""
        return self.status.text

    @property
    def run(self) -> str:
        """The run folder of ``device``; empty if it is not known."""
        match = re.fullmatch(r"rank \d+ of (?P<run>.*) on \S+", self.device)
        return match["run"] if match else ""

    def lost(self, now_s: float) -> bool:
        """True if the job is RUNNING and its lease has expired at ``now_s`` (``JobStore.now_s``)."""
        return self.state is JobState.RUNNING and self.lease_until_s is not None and self.lease_until_s <= now_s


@dataclass(frozen=True, slots=True)
class Claim:
    """The proof that an agent holds a job."""

    job: Job
    owner: str

    @property
    def attempt(self) -> int:
        return self.job.attempt


class Standing(StrEnum):
    """The answer of a heartbeat to the agent."""

    HELD = "held"
    MOVE = "asked for"  # still held, but an idle device waits for the job: it should be stopped and released
    CANCELLED = "cancelled"  # still held, but the job should be stopped and finished as CANCELLED
    LOST = "lost"  # the lease has expired, and the job no longer belongs to this agent


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """A device of the store: a rank whose bubbles are open to jobs."""

    name: str  # unique name, made of run and rank
    run: str
    busy_until_s: float | None = None  # expected end of its job; None if it is idle, infinity if unknown
    job: str = ""  # name of its job; empty for none
    cycle: dict[str, Any] | None = None  # bubble cycle, as JSON of ``BubbleCycle``; None before it is measured
    refuses: tuple[int, ...] = ()  # numbers of jobs that do not fit its current cycle
