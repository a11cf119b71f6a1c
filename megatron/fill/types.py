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
    """The key of a bubble cycle: two iterations with equal keys have the same bubbles in the same order.

    Attributes:
        forward_only: True for a schedule without backwards; to a listener, for an evaluation.
    """

    schedule: str
    microbatches: int
    chunks: int = 1
    forward_only: bool = False

    def __str__(self) -> str:
        text = f"{self.schedule}, {self.microbatches} microbatches"
        if self.chunks > 1:
            text += f" x {self.chunks} chunks"
        return text + (", forward only" if self.forward_only else "")


# Not frozen: the rank makes one in every bubble, and a frozen one takes three times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class Bubble:
    """An observed bubble of a rank.

    Attributes:
        iteration: number of the training iteration, from 1, as Megatron prints it.
        index: position in the iteration's bubble cycle, from 0; outside the pipeline, among the waits of its kind in
            the save, the iteration or the evaluation's schedule.
        predicted_ns: duration predicted when it opened; 0 for no prediction.
        seq: the gate's number of it; 0 if the gate stayed shut (too short, not yet predictable, filling off).
        free_bytes: device memory that the training left free.
        filling: True if filling was on, so that the bubble counts in the harvest ratio.
        forward_only: True for a bubble of an evaluation, of the pipeline or for a batch.
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
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class BrakeEvent:
    """A stop of the filling of a rank by the automatic brake.

    Attributes:
        iteration: the last iteration before it.
        slowdown: measured slowdown of the training; 0.03 is 3%.
        pairs: number of pairs of stretches with and without filling that it was measured over.
        until: the iteration at which filling resumes.
        guard_ns: time kept free at the end of every predicted bubble from then on.
    """

    iteration: int
    slowdown: float
    pairs: int
    until: int
    guard_ns: int


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Observations of one rank: all of them, or those since its last write.

    Attributes:
        schedule: key of its last training iteration; None if there was none.
        settled_after: the last iteration in which jobs of some rank still set themselves up; 0 until they have settled.
        lost_until: the last iteration written before its file was deleted; 0 if it was not deleted.
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
    """The resource that a bubble lacked for a further step."""

    TIME = 0
    MEMORY = 1
    JOB = 2  # the job had ended, was to stop or to pause, or waited for a new plan


@dataclass(frozen=True, slots=True)
class BubbleUse:
    """A worker's use of one bubble, which may be none.

    Attributes:
        seq: the gate's number of the bubble.
        latency_ns: time from the gate's opening to the first step's start, without ``held_ns`` before it; -1 if no step
            ran, or one was in flight.
        harvested_ns: time inside steps and inside the bubble.
        overrun_ns: time that the last step ran on after the bubble's end; 0 for none.
        steps: number of steps begun in it; one that began in an earlier bubble counts in ``harvested_ns`` only.
        left_ns: time at which the worker was done with it, including the pause after the last step.
        lack: the resource that it lacked for a further step (a ``Lack``).
        held_ns: time up to ``left_ns`` for which it waited until many bubbles like this one would have ended.
    """

    seq: int
    latency_ns: int
    harvested_ns: int
    overrun_ns: int
    steps: int
    left_ns: int = 0
    lack: int = Lack.TIME
    held_ns: int = 0

    @property
    def idle(self) -> bool:
        """True if no step ran in it."""
        return not (self.steps or self.harvested_ns)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's record over a run: exact totals, and the most recent bubbles and steps.

    Attributes:
        alone_ns: step time measured alone, after the training's last iteration.
        alone_work: work of those steps.
        uses: its uses of the most recent bubbles.
        older_uses: number of its uses before those.
        steps: ``(start_ns, end_ns)`` of the most recent steps.
        callbacks: longest time of each callback but ``run_next_step()``, in ns; only of calls that returned.
        partial_work: part of ``work_done`` that no checkpoint covers, of an iteration that had not ended.
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
    """Prices of an hour, in any currency.

    Attributes:
        main: price of all devices of the training together.
        side: price of one of the cheaper devices that jobs would run on otherwise.
    """

    main: float
    side: float


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that the jobs of each user may take, over all trainings that serve one store.

    Attributes:
        jobs: number of jobs that run at a time; None for any number.
        device_hours: hours inside steps and inside bubbles, of the jobs that ended in the last ``days`` or have not
            ended; None for any number.
    """

    jobs: int | None = None
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
    """The outcome of an attempt at a job, or its progress so far.

    Attributes:
        what: ``module:Class`` or the command line.
        rank: rank of the training whose bubbles it ran in; None if it never started.
        total_work: amount of work in all; None if the task did not report it.
        result: values that the task reported with ``context.report``.
        directory: its folder, with the task's own files.
        ended_s: time of this record, in seconds since the epoch; a job that was retried has several records.
        attempt: number of the attempt, as the store counts the job's claims.
        started_ns, ended_ns: times at which its worker was started, and had ended.
        ready_ns: time at which the worker called the task's ``create``, or first waited for a bubble for its command;
            0 for never.
        peak_bytes: peak of the device memory observed; 0 if it was not observed in time.
        offences: number of violations: something of it ran on after its bubble for longer than the grace period.
        side_throughput: its work per second on a cheaper device (``Prices.side``); None if the user did not state it.
    """

    name: str
    what: str
    status: Status
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

    @property
    def state(self) -> JobState:
        return self.status.state

    @property
    def reason(self) -> str:
        return self.status.text
