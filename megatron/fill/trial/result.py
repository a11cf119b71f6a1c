"""Options and result of a trial; ``pipefill try --json`` prints the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a trial."""

    bubble_ms: float = 50.0  # duration of each bubble
    period_ms: float = 200.0  # time from the start of one bubble to that of the next
    seconds: float = 5.0  # time for which the job gets bubbles, once it is ready for them
    startup_seconds: float = 120.0  # time limit for the job to become ready
    device: str = "cpu"
    round_trip: bool = True  # save the job and resume it in a new process, if it can be saved
    settings: dict[str, Any] = field(default_factory=dict)  # values of ``FillSettings``, by field


class Ended(StrEnum):
    """Outcomes of a trial."""

    OK = "ok"  # the job would run
    FAILED = "failed"
    REFUSED = "refused"  # not run, since something that it names does not exist or does not fit


class RoundTrip(StrEnum):
    """Outcomes of saving a task and resuming it in a new process."""

    OK = "ok"
    FAILED = "failed"
    NEVER_SAVED = "never saved"  # it ended or failed before it was saved
    NOT_RESUMABLE = "not resumable"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Steps:
    """Durations of the most recent steps, in ms."""

    count: int  # of all steps
    p50_ms: float
    p99_ms: float
    longest_ms: float


@dataclass(frozen=True, slots=True)
class Use:
    """The job's use of the bubbles that were open from its first one on."""

    bubbles: int  # number of bubbles
    used: float  # share of their time inside steps
    # median time from the opening of a bubble to the start of its first step; None without any step
    first_step_us: float | None
    overran: int  # number of bubbles after whose end the last step ran on
    longest_overrun_ms: float  # the longest such overrun
    violations: int  # number of times that a start, a step or a pause ran on for longer than the grace period


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The outcome of saving the task and resuming it in a new process."""

    outcome: RoundTrip
    size_bytes: int = 0  # size of the file
    saved_work: float = 0.0  # work done when the first process ended
    loaded_work: float = 0.0  # work done when the second one had resumed


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a job's trial."""

    job: str
    what: str  # ``module:Class`` or the command line
    device: str
    ended: Ended
    reason: str = ""  # reason why it failed or was refused; empty if neither
    finished: bool = False  # the job finished; otherwise it was stopped, as at the end of a training
    command: bool = False  # the job is a command, which has no callbacks and no steps
    bubble_ms: float = 0.0  # duration of each bubble; 0 if it was not run
    period_ms: float = 0.0
    grace_ms: float = 0.0  # grace period after a bubble
    unit: str = "steps"
    work_done: float = 0.0
    total_work: float | None = None
    # longest duration of each callback that returned, except ``run_next_step()``
    callbacks_ms: dict[str, float] = field(default_factory=dict)
    steps: Steps | None = None  # None if it did not get that far
    use: Use | None = None  # likewise
    peak_bytes: int = 0  # largest memory measured; 0 if the job ended before the first measurement
    memory_bytes: int | None = None  # its memory cap; None for none
    checkpoint: Checkpoint = Checkpoint(RoundTrip.NOT_TRIED)
    result: dict[str, Any] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)  # hints for improving it
    # the end of its output after a failure, from the traceback on; otherwise empty
    output: list[str] = field(default_factory=list)
    folder: str = ""  # its folder if that is kept; otherwise empty
