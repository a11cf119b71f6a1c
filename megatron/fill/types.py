"""The values that pass between PipeFill's parts: frozen and torch-free.

Times are nanoseconds of ``CLOCK_MONOTONIC`` (``_ns``), which all processes of a machine share; memory is in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any


def fills_block(block: int) -> bool:
    """Whether a block of a paired comparison is with filling: on, off, off, on, so that a drift favours neither.

    The warm-up, which is block -1, is without.
    """
    return block >= 0 and block % 4 in (0, 3)


class BubbleKind(StrEnum):
    """Where in an iteration a rank waits for other stages (PipeFill, section 2)."""

    FILL = "fill"  # before the first forward
    FWD_BWD = "fwd-bwd"  # between the last warm-up forward and the first backward
    INTERIOR = "interior"  # non-contiguous, inside the steady state
    DRAIN = "drain"  # after the last backward, until the iteration's last cross-stage collective


class JobState(StrEnum):
    """Where a fill job is in its life."""

    QUEUED = "QUEUED"  # waits for a device; also when the main job ended first: it goes on from its checkpoint
    RUNNING = "RUNNING"  # an agent holds it
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def finished(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class CycleKey:
    """What a bubble cycle depends on: two iterations with equal keys have the same bubbles in the same order."""

    schedule: str
    microbatches: int
    chunks: int = 1
    forward_only: bool = False

    def __str__(self) -> str:
        text = f"{self.schedule}, {self.microbatches} microbatches"
        if self.chunks > 1:
            text += f" x {self.chunks} chunks"
        return text + (", forward only" if self.forward_only else "")


@dataclass(frozen=True, slots=True)
class Bubble:
    """One observed bubble of one rank.

    Attributes:
        iteration: 1 for the first training iteration of the run, as Megatron prints it.
        index: position in the iteration's bubble cycle, from 0.
        predicted_ns: the duration the predictor expected when it opened; 0 where it expected nothing.
        seq: the gate's number for it; 0 where the gate stayed shut (too short, not yet predictable, filling off).
        free_bytes: device memory that the main job left free.
        filling: whether filling was on, so that the bubble counts in the harvest ratio.
        forward_only: the bubble belongs to an evaluation.
    """

    iteration: int
    index: int
    kind: BubbleKind
    start_ns: int
    end_ns: int
    predicted_ns: int = 0
    seq: int = 0
    free_bytes: int = 0
    filling: bool = False
    forward_only: bool = False

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Iteration:
    """One training iteration of one rank: from the start of ``train_step`` to its end."""

    iteration: int
    start_ns: int
    end_ns: int
    filling: bool = False
    block: int = -1  # which block of --fill-paired-blocks; -1 outside them
    watched: bool = True  # its bubbles were heard of


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the main job's compute, for the trace: ``forward`` or ``backward`` of one microbatch."""

    name: str
    iteration: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where one rank of the main job stands."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    stage: int
    stages: int
    data_parallel_rank: int = 0
    tensor_parallel_rank: int = 0
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class BrakeEvent:
    """The automatic brake stopped the filling of one rank.

    Attributes:
        iteration: the last one before it.
        slowdown: the training's, as measured: 0.03 is 3%.
        pairs: of stretches with and without filling that it was measured over.
        until: the iteration that fills again.
        guard_ns: what is kept free at the end of every predicted bubble from then on.
    """

    iteration: int
    slowdown: float
    pairs: int
    until: int
    guard_ns: int


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank saw, or what it saw since it last wrote.

    Attributes:
        schedule: of its last training iteration; None if there was none.
        settled_after: the last iteration in which jobs of some rank still set themselves up, where it is known that
            this was over then; else 0.
        lost_until: the last iteration of what was written before its file was deleted; 0 if it was not.
    """

    info: RankInfo
    iterations: Sequence[Iteration]
    bubbles: Sequence[Bubble]
    spans: Sequence[Span]
    brakes: Sequence[BrakeEvent] = ()
    schedule: CycleKey | None = None
    settled_after: int = 0
    lost_until: int = 0


class Lack(IntEnum):
    """What a bubble lacked for a further step, or for any."""

    TIME = 0
    MEMORY = 1
    JOB = 2  # the job had ended, was to stop or to pause, or waited for a new plan


@dataclass(frozen=True, slots=True)
class BubbleUse:
    """What a worker did in one bubble, or that it did nothing in it.

    Attributes:
        seq: the gate's number of the bubble.
        latency_ns: from the gate's opening to the start of the first step; -1 if no step ran, or one was in flight.
        harvested_ns: time inside steps and inside the bubble.
        overrun_ns: how long the last step ran on after the bubble's end; 0 for none.
        steps: the steps begun in it; one that began in an earlier bubble counts in ``harvested_ns`` only.
        left_ns: when the worker was done with it, the pause after the last step included.
        lack: why it did no more in it (a ``Lack``).
    """

    seq: int
    latency_ns: int
    harvested_ns: int
    overrun_ns: int
    steps: int
    left_ns: int = 0
    lack: int = Lack.TIME

    @property
    def idle(self) -> bool:
        """Whether no step ran in it."""
        return not (self.steps or self.harvested_ns)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What one worker did over a run: exact totals, and the most recent bubbles and steps.

    Attributes:
        alone_ns: step time measured while the main job stood still after its last iteration.
        alone_work: the work of those steps.
        uses: the most recent bubbles it was given.
        older_uses: how many it was given before those.
        steps: ``(start_ns, end_ns)`` of the most recent steps.
        callbacks: the longest that each callback took but ``run_next_step()``, ns; only those that returned.
        partial_work: the part of ``work_done`` that no checkpoint has: that of an iteration that had not ended.
    """

    job: str
    rank: int
    steps_done: int
    work_done: float
    harvested_ns: int
    alone_ns: int
    alone_work: float
    uses: Sequence[BubbleUse] = ()
    steps: Sequence[tuple[int, int]] = ()
    callbacks: dict[str, int] = field(default_factory=dict)
    partial_work: float = 0.0
    older_uses: int = 0


@dataclass(frozen=True, slots=True)
class Prices:
    """What an hour costs, in any currency.

    Attributes:
        main: of all that the training runs on, together.
        side: of one of the cheaper devices that the side work would otherwise run on.
    """

    main: float
    side: float


@dataclass(frozen=True, slots=True)
class JobRecord:
    """How one fill job ended, or how far it has come.

    Attributes:
        what: ``module:Class`` or the command line.
        rank: the main job's rank whose bubbles it ran in; None if it never started.
        total_work: how much there was to do, where the task said so.
        result: what the task reported with ``context.report``.
        directory: its folder, with the task's own files.
        ended_s: when this was noted, in seconds since the epoch; a job that was tried again has several records.
        attempt: which of them it is, as the store counts the job's claims.
        started_ns: when its worker was started, by CLOCK_MONOTONIC of its machine.
        ready_ns: when the worker called the task's ``create``, or first waited for a bubble for its command; 0 for
            never.
        ended_ns: when the worker had ended.
        peak_bytes: the most device memory that it was seen to hold; 0 where nobody looked in time.
        offences: how often something of it ran on after its bubble for longer than the grace.
        side_throughput: its work per second on a cheaper device (``Prices.side``), where the user stated it.
    """

    name: str
    what: str
    state: JobState
    reason: str
    work_done: float
    unit: str
    rank: int | None = None
    steps: int = 0
    harvested_s: float = 0.0
    total_work: float | None = None
    result: dict[str, Any] = field(default_factory=dict)
    directory: str = ""
    ended_s: float = 0.0
    attempt: int = 0
    started_ns: int = 0
    ready_ns: int = 0
    ended_ns: int = 0
    peak_bytes: int = 0
    offences: int = 0
    side_throughput: float | None = None
