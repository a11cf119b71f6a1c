"""How a job is tried, and what came of it, as ``pipefill try --json`` prints it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """How jobs are tried.

    Attributes:
        bubble_ms: how long each bubble lasts.
        period_ms: from the start of one bubble to that of the next.
        seconds: for how long the job is given bubbles, once it waits for them.
        startup_seconds: how long it may take until it does.
        round_trip: save it and go on with it in a new process, if it can be saved.
        settings: of the ``--fill-*`` kind, by field.
    """

    bubble_ms: float = 50.0
    period_ms: float = 200.0
    seconds: float = 5.0
    startup_seconds: float = 120.0
    device: str = "cpu"
    round_trip: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


class Ended(StrEnum):
    """Where in its life the trial of a job ended."""

    OK = "ok"  # it would run
    FAILED = "failed"
    REFUSED = "refused"  # something does not exist or does not fit: it was not run


class RoundTrip(StrEnum):
    """What came of saving a task and going on with it in a new process."""

    OK = "ok"
    FAILED = "failed"
    NEVER_SAVED = "never saved"  # it was over, or failed, before
    NOT_RESUMABLE = "not resumable"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Steps:
    """Times of the most recent steps, ms.

    Attributes:
        count: of all steps.
    """

    count: int
    p50_ms: float
    p99_ms: float
    longest_ms: float


@dataclass(frozen=True, slots=True)
class Use:
    """Of the bubbles that were open from the job's first one on.

    Attributes:
        bubbles: how many.
        used: the share of their time inside steps.
        first_step_us: from the opening of a bubble to the start of its first step, median; None if no step began.
        overran: in how many bubbles the last step ran on after the end.
        longest_overrun_ms: the longest of these.
        offences: how often a start, a step or a pause ran on for longer than the grace.
    """

    bubbles: int
    used: float
    first_step_us: float | None
    overran: int
    longest_overrun_ms: float
    offences: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The round trip.

    Attributes:
        size_bytes: of the file.
        saved_work, loaded_work: when the first process ended, and from where the second went on.
    """

    outcome: RoundTrip
    size_bytes: int = 0
    saved_work: float = 0.0
    loaded_work: float = 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of trying one job.

    Attributes:
        what: ``module:Class`` or the command line.
        reason: why it failed or was refused; empty if neither.
        finished: it came to its end; else it was stopped, as at the end of a training.
        command: it is a command, which has no callbacks and no steps.
        bubble_ms, period_ms: of the bubbles that it was given; 0 where it was not run.
        grace_ms: what a run grants after a bubble, as ``--fill-grace-ms``.
        callbacks_ms: the longest that each callback took but ``run_next_step()``; only those that returned.
        steps, use: None where it did not come so far.
        peak_bytes: the most that it was seen to hold; 0 where it was too short-lived to be seen.
        memory_bytes: its cap; None for none.
        hints: what would make it better, a sentence each.
        output: the end of what it printed, from a failure's traceback on; nothing where all went well.
        folder: its folder, where that is kept; empty if not.
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
