"""Options and result of a trial; ``pipefill try --json`` prints the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a trial.

    Attributes:
        bubble_ms: duration of each bubble.
        period_ms: time from the start of one bubble to that of the next.
        seconds: time for which the job gets bubbles, once it is ready for them.
        startup_seconds: time limit for the job to become ready.
        round_trip: save the job and resume it in a new process, if it can be saved.
        settings: values of ``FillSettings``, by field.
    """

    bubble_ms: float = 50.0
    period_ms: float = 200.0
    seconds: float = 5.0
    startup_seconds: float = 120.0
    device: str = "cpu"
    round_trip: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


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
    """The job's use of the bubbles that were open from its first one on.

    Attributes:
        bubbles: number of bubbles.
        used: share of their time inside steps.
        first_step_us: median time from the opening of a bubble to the start of its first step; None without any step.
        overran: number of bubbles after whose end the last step ran on.
        longest_overrun_ms: the longest such overrun.
        offences: number of times that a start, a step or a pause ran on for longer than the grace period.
    """

    bubbles: int
    used: float
    first_step_us: float | None
    overran: int
    longest_overrun_ms: float
    offences: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The outcome of saving the task and resuming it in a new process.

    Attributes:
        size_bytes: size of the file.
        saved_work, loaded_work: work done when the first process ended, and when the second one had resumed.
    """

    outcome: RoundTrip
    size_bytes: int = 0
    saved_work: float = 0.0
    loaded_work: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a job's trial.

    Attributes:
        what: ``module:Class`` or the command line.
        reason: reason why it failed or was refused; empty if neither.
        finished: the job finished; otherwise it was stopped, as at the end of a training.
        command: the job is a command, which has no callbacks and no steps.
        bubble_ms, period_ms: duration and period of its bubbles; 0 if it was not run.
        grace_ms: grace period after a bubble (``grace_ms``).
        callbacks_ms: longest duration of each callback that returned, except ``run_next_step()``.
        steps, use: steps and use of bubbles; None if it did not get that far.
        peak_bytes: largest memory measured; 0 if the job ended before the first measurement.
        memory_bytes: its memory cap; None for none.
        hints: hints for improving it.
        output: the end of its output after a failure, from the traceback on; otherwise empty.
        folder: its folder if that is kept; otherwise empty.
    """

    job: str
    what: str
    device: str
    ended: Ended
    reason: str = ""
    finished: bool = False
    command: bool = False
    bubble_ms: float = 0.0
    period_ms: float = 0.0
    grace_ms: float = 0.0
    unit: str = "steps"
    work_done: float = 0.0
    total_work: float | None = None
    callbacks_ms: dict[str, float] = field(default_factory=dict)
    steps: Steps | None = None
    use: Use | None = None
    peak_bytes: int = 0
    memory_bytes: int | None = None
    checkpoint: Checkpoint = Checkpoint(RoundTrip.NOT_TRIED)
    result: dict[str, Any] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    folder: str = ""
