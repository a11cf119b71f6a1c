"""Values that pass between PipeFill's parts: frozen and torch-free.

Times are nanoseconds of ``CLOCK_MONOTONIC`` (``_ns``), which all processes of a machine share; memory is in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from megatron.fill.status import JobState, Status


def fills_block(block: int) -> bool:
    """True if a block of a paired comparison is with filling: on, off, off, on, so that a drift favours neither.

    The warm-up is block -1, without filling.
    """
    return block >= 0 and block % 4 in (0, 3)


class BubbleKind(StrEnum):
    """The place of a bubble in the iteration (PipeFill, section 2), or what the rank waits for outside the pipeline."""

    FILL = "fill"  # before the first forward
    FWD_BWD = "fwd-bwd"  # between the last warm-up forward and the first backward
    INTERIOR = "interior"  # non-contiguous, inside the steady state
    DRAIN = "drain"  # after the last backward, until the iteration's last cross-stage collective
    SAVE = "save"  # for other ranks or storage, in a checkpoint's save
    DATA = "data"  # for the next batch
    GROUP = "group"  # for other ranks, such as its replicas, in other collectives of an iteration


PIPELINE_KINDS = (BubbleKind.FILL, BubbleKind.FWD_BWD, BubbleKind.INTERIOR, BubbleKind.DRAIN)  # those of the cycle


@dataclass(frozen=True, slots=True)
class CycleKey:
    """The key of a bubble cycle: two iterations with equal keys have the same bubbles in the same order."""

    schedule: str
    microbatches: int
    chunks: int = 1
    forward_only: bool = False  # True for a schedule without backwards; to a listener, for an evaluation
    group_size: int = 0  # of microbatches that a rank runs on a chunk before it takes the next; 0 with one chunk

    def __str__(self) -> str:
        text = f"{self.schedule}, {self.microbatches} microbatches"
        if self.chunks > 1:
            text += f" x {self.chunks} chunks"
        return text + (", forward only" if self.forward_only else "")


# Not frozen: the rank makes one in every bubble, and a frozen one takes three times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class Bubble:
    """An observed bubble of a rank."""

    iteration: int  # number of the training iteration, from 1, as Megatron prints it
    # Position in the iteration's bubble cycle, from 0; outside the pipeline, among the waits of its kind in the save,
    # the iteration or the evaluation's schedule.
    index: int
    kind: BubbleKind
    start_ns: int
    end_ns: int
    predicted_ns: int = 0  # duration predicted when it opened; 0 for no prediction
    seq: int = 0  # the gate's number of it; 0 if the gate stayed shut (too short, not yet predictable, filling off)
    free_bytes: int = 0  # device memory that the training left free
    filling: bool = False  # True if filling was on, so that the bubble counts in the harvest ratio
    forward_only: bool = False  # True for a bubble of an evaluation, of the pipeline or for a batch

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Iteration:
    """A training iteration of a rank, from the start of ``train_step`` to its end."""

    iteration: int
    start_ns: int
    end_ns: int
    filling: bool = False
    block: int = -1  # number of the block of --fill-paired-blocks; -1 outside of them
    watched: bool = True  # its bubbles were observed

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the training's compute, for the trace: ``forward`` or ``backward`` of one microbatch."""

    name: str
    iteration: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The place of a rank of the training: its node, pipeline stage, parallel ranks and device."""

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
    context_parallel_rank: int = 0
    expert_data_parallel_rank: int = 0
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class BrakeEvent:
    """A stop of the filling of a rank by the automatic brake."""

    iteration: int  # the last iteration before it
    slowdown: float  # measured slowdown of the training; 0.03 is 3%
    pairs: int  # number of pairs of stretches with and without filling that it was measured over
    until: int  # the iteration at which filling resumes
    guard_ns: int  # time kept free at the end of every predicted bubble from then on


MOST_SETTLING = 200  # number of iterations after the warm-up after which jobs count as settled in any case


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Observations of one rank: all of them, or those since its last write."""

    info: RankInfo
    iterations: Sequence[Iteration]
    bubbles: Sequence[Bubble]
    spans: Sequence[Span]
    brakes: Sequence[BrakeEvent] = ()
    schedule: CycleKey | None = None  # key of its last training iteration; None if there was none
    # The last iteration in which jobs of some rank still set themselves up; 0 until they have settled.
    settled_after: int = 0
    lost_until: int = 0  # the last iteration written before its file was deleted; 0 if it was not deleted


class Lack(IntEnum):
    """The resource that a bubble lacked for a further step."""

    TIME = 0
    MEMORY = 1
    JOB = 2  # the job had ended, was to stop or to pause, or waited for a new plan


@dataclass(frozen=True, slots=True)
class BubbleUse:
    """A worker's use of one bubble, which may be none."""

    seq: int  # the gate's number of the bubble
    # Time from the gate's opening to the first step's start, without ``held_ns`` before it; -1 if no step ran, or one
    # was in flight.
    latency_ns: int
    harvested_ns: int  # time inside steps and inside the bubble
    overrun_ns: int  # time that the last step ran on after the bubble's end; 0 for none
    steps: int  # number of steps begun in it; one that began in an earlier bubble counts in ``harvested_ns`` only
    left_ns: int = 0  # time at which the worker was done with it, including the pause after the last step
    lack: int = Lack.TIME  # the resource that it lacked for a further step (a ``Lack``)
    held_ns: int = 0  # time up to ``left_ns`` for which it waited until many bubbles like this one would have ended

    @property
    def idle(self) -> bool:
        """True if no step ran in it."""
        return not (self.steps or self.harvested_ns)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's record over a run: exact totals, and the most recent bubbles and steps."""

    job: str
    rank: int
    steps_done: int
    work_done: float
    harvested_ns: int
    alone_ns: int  # step time measured alone, after the training's last iteration
    alone_work: float  # work of those steps
    uses: Sequence[BubbleUse] = ()  # its uses of the most recent bubbles
    steps: Sequence[tuple[int, int]] = ()  # ``(start_ns, end_ns)`` of the most recent steps
    # Longest time of each callback but ``run_next_step()``, in ns; only of calls that returned.
    callbacks: dict[str, int] = field(default_factory=dict)
    partial_work: float = 0.0  # part of ``work_done`` that no checkpoint covers, of an iteration that had not ended
    older_uses: int = 0  # number of its uses before ``uses``


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of an hour, in any currency."""

    main: float  # price of all devices of the training together
    side: float  # price of one of the cheaper devices that jobs would run on otherwise


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that the jobs of each user may take, over all trainings that serve one store."""

    jobs: int | None = None  # number of jobs that run at a time; None for any number
    # Hours inside steps and inside bubbles, of the jobs that ended in the last ``days`` or have not ended; None for
    # any number.
    device_hours: float | None = None
    days: float = 30.0

    def __str__(self) -> str:
        jobs = [] if self.jobs is None else [f"at most {self.jobs} running"]
        return ", ".join([*jobs, self.hours] if self.hours else jobs)

    @property
    def hours(self) -> str:
        """The most device-hours, such as ``2 device-hours in 1 day``; "" for any number."""
        if self.device_hours is None:
            return ""
        hours, days = ("" if number == 1 else "s" for number in (self.device_hours, self.days))
        return f"{self.device_hours:g} device-hour{hours} in {self.days:g} day{days}"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The outcome of an attempt at a job, or its progress so far."""

    name: str
    what: str  # ``module:Class`` or the command line
    status: Status
    work_done: float
    unit: str
    rank: int | None = None  # rank of the training whose bubbles it ran in; None if it never started
    steps: int = 0
    harvested_s: float = 0.0
    total_work: float | None = None  # amount of work in all; None if the task did not report it
    result: dict[str, Any] = field(default_factory=dict)  # values that the task reported with ``context.report``
    directory: str = ""  # its folder, with the task's own files
    ended_s: float = 0.0  # time of this record, since the epoch; a job that was retried has several records
    attempt: int = 0  # number of the attempt, as the store counts the job's claims
    started_ns: int = 0  # time at which its worker was started
    ready_ns: int = 0  # time at which it called ``create``, or first waited for a bubble for its command; 0 for never
    ended_ns: int = 0  # time at which its worker had ended
    peak_bytes: int = 0  # peak of the device memory observed; 0 if it was not observed in time
    violations: int = 0  # number of times that something of it ran on after its bubble for longer than the grace period
    side_throughput: float | None = None  # work per second on a cheaper device (``Prices.side``), if the user states it

    @property
    def state(self) -> JobState:
        return self.status.state

    @property
    def reason(self) -> str:
        return self.status.text
