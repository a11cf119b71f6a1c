"""The models of ``report.json`` and of the bubble-cycle file.  ``docs/report.md`` explains them to a reader.

A name ends in its unit (``_s``, ``_ms``, ``_us``, ``_ns``, ``_bytes``); a value that cannot be known is null, never
NaN.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from megatron.fill.records.segment import SegmentEnding
from megatron.fill.report.timeuse import TimeUse
from megatron.fill.status import Cause
from megatron.fill.types import BubbleKind, JobState

SCHEMA_VERSION = 2


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Slowdown(_Model):
    """Slowdown of the training's iterations with something than without it, from pairs of neighbours."""

    mean: float = Field(description="mean over the pairs of (time with / time without) - 1; 0.01 is 1%")
    ci95: tuple[float, float] = Field(description="95% bootstrap interval of the mean over the pairs: [low, high]")
    pairs: int = Field(description="number of pairs")


class Percentiles(_Model):
    """The distribution of a short time, in microseconds."""

    count: int = Field(description="number of values")
    p50: float = Field(description="median")
    p99: float = Field(description="99th percentile")
    max: float = Field(description="largest")


class Times(_Model):
    """The distribution of iteration times."""

    count: int = Field(description="number of iterations")
    mean_s: float = Field(description="mean seconds")
    median_s: float = Field(description="median seconds")
    p99_s: float = Field(description="99th percentile, seconds")


class PairedTimes(_Model):
    """The iteration times inside the paired blocks, with filling on and off."""

    on: Times | None = Field(description="iterations with filling on")
    off: Times | None = Field(description="iterations with filling off, watched")


class WorkReport(_Model):
    """The work of one job in the bubbles of one rank (in the total: of all ranks)."""

    job: str = Field(description="the job's name")
    work_done: float = Field(description="work done in bubbles, in the job's unit")
    unit: str = Field(description="the unit of work, as the task names it")
    steps: int = Field(description="steps done in bubbles")
    harvested_s: float = Field(description="seconds inside steps and inside bubbles")


class Outside(_Model):
    """Waits outside the pipeline: in a checkpoint's save, for the next batch, or for replicas."""

    total_s: float = Field(description="seconds of them, in no bubble_s")
    fillable_s: float = Field(description="seconds of them while filling was on and jobs had settled")
    harvested_s: float = Field(description="seconds inside steps and inside them, of those that are still recorded")


class Totals(_Model):
    """The figures of one rank, or of all ranks together."""

    iterations: int = Field(description="training iterations; in the total, the most of any rank")
    iteration_s: float = Field(description="seconds in training iterations; in the total, summed over ranks")
    iteration_time: Times | None = Field(description="training iteration times; in the total, of all ranks pooled")
    bubble_s: dict[BubbleKind, float] = Field(description="seconds of bubbles in training iterations, by kind")
    bubble_share: float | None = Field(description="sum of bubble_s / iteration_s")
    evaluation_bubble_s: dict[BubbleKind, float] = Field(description="seconds of bubbles in evaluations, by kind")
    fillable_s: float = Field(description="seconds of all bubbles while filling was on and jobs had settled")
    settling_s: float = Field(description="seconds of bubbles with filling on before that, in no other figure")
    harvested_s: float | None = Field(description="seconds inside steps and fillable bubbles; null if known of no rank")
    harvest_ratio: float | None = Field(description="harvested_s / fillable_s, of ranks whose harvest is known")
    outside: dict[BubbleKind, Outside] = Field(description="waits outside the pipeline, by kind; none without any")
    fill_efficiency: float | None = Field(description="work per fillable second / work per second alone")
    time_use_ns: dict[TimeUse, int] = Field(description="the nanoseconds of fillable_s, by use")
    steps: int = Field(description="steps of jobs done in bubbles")
    work: list[WorkReport] = Field(description="the work of each job")
    open_to_step_us: Percentiles | None = Field(description="time from a gate's opening to the first step's start")
    overrun_us: Percentiles | None = Field(description="time that the last step ran on after its bubble; 0 counts")
    paired: PairedTimes | None = Field(description="iteration times with filling on and off, inside paired blocks")
    predicted_bubbles: int = Field(description="bubbles of the pipeline whose duration was predicted when they opened")
    prediction_error_ms: float | None = Field(description="mean absolute error of those predictions")


class BrakeReport(_Model):
    """A stop of the filling of a rank by the automatic brake: the training was slower than --fill-max-slowdown."""

    iteration: int = Field(description="the last iteration before it")
    slowdown: float = Field(description="the training's slowdown as measured then; 0.03 is 3%")
    pairs: int = Field(description="pairs of stretches with and without filling that it was measured over")
    until: int = Field(description="the iteration at which filling was to resume")
    guard_ms: float = Field(description="time kept free at the end of every predicted bubble from then on")


class RankReport(Totals):
    """The figures of one rank of the training."""

    rank: int = Field(description="the rank in the training")
    stage: int = Field(description="its pipeline stage, from 0")
    node: int = Field(description="the node that it runs on, from 0")
    device: str = Field(description="its device")
    data_parallel_rank: int = Field(description="its place in data parallelism")
    tensor_parallel_rank: int = Field(description="its place in tensor parallelism")
    context_parallel_rank: int = Field(description="its place in context parallelism")
    expert_data_parallel_rank: int = Field(description="its place among the replicas of its experts")
    harvest_unknown: str = Field(description="reason why its harvest is unknown in some segment; empty if it is known")
    brakes: list[BrakeReport] = Field(description="each time that the automatic brake stopped its filling")


class StageReport(Totals):
    """The figures of one pipeline stage, over all ranks that ran it."""

    stage: int = Field(description="the stage, from 0")
    ranks: int = Field(description="number of ranks that ran it")


class CycleBubble(_Model):
    """A bubble of the cycle: the bubble at one position of every iteration."""

    index: int = Field(description="its position in the cycle, from 0")
    kind: BubbleKind = Field(description="its place in the iteration: fill, fwd-bwd, interior or drain")
    mean_ms: float = Field(description="mean duration")
    median_ms: float = Field(description="median duration")
    p10_ms: float = Field(description="10th percentile of the duration")
    p90_ms: float = Field(description="90th percentile of the duration")
    offset_ms: float = Field(description="median time from the iteration's start (evaluation: its first bubble) to it")
    share: float | None = Field(description="mean duration / mean iteration time; null in evaluations")
    free_bytes: int = Field(description="least device memory that the training left free; 0 if not measured")
    count: int = Field(description="iterations that the figures are from")


class RankCycle(_Model):
    """The bubble cycle of one rank."""

    rank: int = Field(description="the rank in the training")
    stage: int = Field(description="its pipeline stage, from 0")
    iteration_ms: float | None = Field(description="mean time of the iterations that the cycle is from")
    training: list[CycleBubble] = Field(description="the bubbles of a training iteration, in order")
    evaluation: list[CycleBubble] = Field(description="the bubbles of an evaluation iteration, in order")


class Cycles(_Model):
    """The file that ``--fill-profile-only`` writes."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="version of this schema")
    ranks: list[RankCycle] = Field(description="the bubble cycle of each rank")


class JobSummary(_Model):
    """The outcome of one job, in short."""

    name: str = Field(description="the job's name")
    state: JobState = Field(description="QUEUED, RUNNING, SUCCEEDED, FAILED or CANCELLED")
    cause: Cause = Field(default=Cause.NONE, description="the cause of its state, a fixed word; empty if unknown")
    reason: str = Field(description="the reason for its state")
    work_done: float = Field(description="work done, in its unit")
    unit: str = Field(description="the unit of work, as the task names it")


class AttemptReport(_Model):
    """An attempt at a job: from when an agent took it to when it gave it back, or ended."""

    segment: int = Field(description="the segment of the run that it was in")
    rank: int | None = Field(description="the rank whose bubbles it ran in")
    state: JobState = Field(description="its outcome; QUEUED: to be resumed later")
    cause: Cause = Field(default=Cause.NONE, description="the cause of its state, a fixed word; empty if unknown")
    reason: str = Field(description="the reason for its state")
    ready_s: float | None = Field(description="seconds from the worker's start to the job's; null if it never began")
    work_done: float = Field(description="work done in it, in the job's unit")
    steps: int = Field(description="steps done in it")
    harvested_s: float = Field(description="seconds inside its steps, in bubbles or between trainings")


class JobReport(JobSummary):
    """The outcome of one job, in full."""

    what: str = Field(description="module:Class, or the command line")
    rank: int | None = Field(description="the rank whose bubbles it ran in; null if it never started")
    steps: int = Field(description="steps done")
    harvested_s: float = Field(description="seconds inside its steps, in bubbles or between trainings")
    rate: float | None = Field(description="work_done / harvested_s")
    total_work: float | None = Field(description="amount of work in all; null if the task did not report it")
    side_throughput: float | None = Field(description="its work per second on a side device, if the user stated it")
    result: dict[str, Any] = Field(description="the values that the task reported")
    directory: str = Field(description="its folder, with the task's own files")
    attempts: list[AttemptReport] = Field(description="each attempt at it in this run, in their order")


class HourPrices(_Model):
    """Prices of an hour, in any currency."""

    main: float = Field(description="price of all devices of the training together")
    side: float = Field(description="price of one side device: a cheaper one, on which jobs would run otherwise")


class SideWork(_Model):
    """The time that a job's work in bubbles would take on a side device."""

    job: str = Field(description="the job's name")
    throughput: float | None = Field(description="work per second on a side device; null if not known")
    measured: bool = Field(description="true if it is the job's measured rate alone on this device, not the user's")
    side_s: float | None = Field(description="seconds of a side device that the work would take; null if not known")


class Cost(_Model):
    """The cost of filling to the training, and the saving from it (FreeRide, arXiv 2409.06941)."""

    with_s: float | None = Field(description="T_with: time of the training in iterations with filling; null for none")
    without_s: float | None = Field(description="T_without: with_s / (1 + time_increase)")
    time_increase: float | None = Field(description="I: the mean slowdown; null without --fill-paired-blocks")
    time_increase_ci95: tuple[float, float] | None = Field(description="its 95% interval")
    saving: float | None = Field(description="S: saving / cost of the training without filling; null if not known")
    saving_ci95: tuple[float, float] | None = Field(description="S over the interval of time_increase")
    prices: HourPrices | None = Field(description="the prices as given; null for none")
    work: list[SideWork] = Field(description="the side-device time of each job that did some work")
    lacking: list[str] = Field(description="the inputs missing for the saving; empty if it is known")


class Summary(_Model):
    """The run in a few figures."""

    iterations: int = Field(description="training iterations, the most of any rank")
    bubble_share: float | None = Field(description="bubble seconds / iteration seconds, over all ranks")
    harvest_ratio: float | None = Field(description="harvested seconds / fillable bubble seconds, over all ranks")
    fill_efficiency: float | None = Field(description="work per fillable second / work per second alone")
    slowdown: Slowdown | None = Field(description="slowdown by filling; null without --fill-paired-blocks")
    watching: Slowdown | None = Field(description="slowdown by watching bubbles; null if not measured")
    brakes: int = Field(description="number of stops by the automatic brake, on the rank with the most")
    open_to_step_us: Percentiles | None = Field(description="time from a gate's opening to the first step's start")
    overrun_us: Percentiles | None = Field(description="time that the last step ran on after its bubble; 0 counts")
    jobs: list[JobSummary] = Field(description="the outcome of each job")


class SandboxLayer(_Model):
    """An isolation layer of the sandbox of jobs."""

    name: str = Field(description="its name, as pipefill doctor prints it")
    lacks: str = Field(description="reason why it was missing; empty if it was there")


class SegmentReport(_Model):
    """A segment of the run: one start of its training."""

    number: int = Field(description="its number, from 1, and the name of its folder in records/")
    ending: SegmentEnding = Field(description="its ending: by itself, failed, cut off, or running if it has not ended")
    started_s: float = Field(description="time at which the process of its rank 0 was started, in seconds since 1970")
    ended_s: float | None = Field(description="time of its end, in seconds since 1970; null if it was not recorded")
    ranks: int = Field(description="number of its ranks")
    recorded: int = Field(description="number of its ranks that left a record")
    iterations: int = Field(description="training iterations that were recorded; the most of any rank")
    first_iteration: int | None = Field(description="the number of the first one; null if there is none")
    last_iteration: int | None = Field(description="the number of the last one; null if there is none")
    store: str = Field(description="the job store that it served, without passwords; empty for none")
    warmup: int | None = Field(default=None, description="iterations before it filled; null where no job was served")
    paired_blocks: int = Field(default=0, description="iterations of a block with or without filling; 0: no blocks")
    command: str = Field(description="the command line of the training")
    lost_until: int | None = Field(description="last iteration whose records were deleted while it ran; null if none")
    unwritten: list[int] = Field(default=[], description="ranks with records in this report that are in no file")
    cut: list[int] = Field(default=[], description="ranks of unwritten with more records than memory could hold")
    between_s: float = Field(description="seconds inside steps of jobs after it, on its devices, without a training")
    between_steps: int = Field(default=0, description="number of these steps")


class NamedTime(_Model):
    """Time of one kind, from the account of the ranks' time."""

    name: str = Field(description="what it went to; unnamed if nothing says that")
    compute: bool = Field(description="true for the training's own computation, false for idle time")
    time_s: float = Field(description="seconds")
    share: float = Field(description="time_s / wall_s")
    long_s: float = Field(description="seconds in stretches of 1 ms or more")


class AccountReport(_Model):
    """The account of a rank's wall time over all segments, or of all ranks together."""

    rank: int | None = Field(description="the rank; null for all ranks together")
    stage: int | None = Field(description="its pipeline stage; null for all ranks together")
    wall_s: float = Field(description="seconds from the start of its process to the end, and between segments")
    named_share: float = Field(description="(compute + named idle time) / wall_s")
    idle_share: float = Field(description="named idle time / wall_s")
    long_idle_s: float = Field(description="seconds of named idle time in stretches of 1 ms or more")
    blind: bool = Field(description="true if no wait was seen in a training of several stages")
    times: list[NamedTime] = Field(description="the wall time by what it went to, longest first")
    host_late_s: float = Field(
        default=0.0,
        description="seconds since the start-up for which its main thread was ready and had no core",
    )


class TimerReport(_Model):
    """Timers of Megatron, and what the account has for the same time; all ranks together."""

    timers: list[str] = Field(description="their names")
    time_s: float = Field(description="seconds by these timers")
    rows: list[str] = Field(default=[], description="names in the account; empty if it has none for them")
    account_s: float | None = Field(default=None, description="seconds of rows; null if the account has none for them")
    difference_s: float | None = Field(default=None, description="account_s - time_s; null if account_s is")


class Late(_Model):
    """Ranks that the others of their group waited for."""

    wait: str = Field(description="pipeline, save, or the name of the group's waits in the account")
    ranks: list[int] = Field(description="the late ranks")
    others: int = Field(description="number of ranks of that group that waited for them")
    late_s: float = Field(description="seconds that the others waited longer than the late ranks, on average")


class Awaited(_Model):
    """A rank that another one waited for in its pipeline, in the latest iterations that have all passes recorded."""

    rank: int = Field(description="the rank that waited")
    peer: int = Field(description="the rank that it waited for")
    iterations: int = Field(description="number of these iterations, at most 50")
    computed_s: float = Field(description="seconds in which the peer ran a pass")
    host_s: float = Field(description="seconds in which the peer was between passes and waited for nobody")
    transfer_s: float = Field(description="seconds from when the peer had done its part to the end of the wait")


class Report(_Model):
    """The content of ``report.json``."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="version of this schema")
    command: str = Field(description="the command line of the training, in the last segment")
    segments: list[SegmentReport] = Field(description="the starts of the training, in order")
    summary: Summary = Field(description="the run in a few figures")
    ranks: list[RankReport] = Field(description="the figures of each rank")
    stages: list[StageReport] = Field(description="the figures of each pipeline stage")
    total: Totals = Field(description="the figures of all ranks together")
    cost: Cost = Field(description="the cost of filling to the training, and the saving from it")
    jobs: list[JobReport] = Field(description="the outcome of each job")
    cycle: list[RankCycle] = Field(description="the bubble cycle of each rank")
    account: list[AccountReport] = Field(description="the account of each rank's wall time, then that of all ranks")
    timers: list[TimerReport] = Field(description="Megatron's own timers; empty below --timing-log-level 1")
    late: list[Late] = Field(description="the ranks that others waited for, those that were waited for longest first")
    waits: list[Awaited] = Field(default=[], description="whom the ranks waited for in their pipeline, longest first")
    sandbox: list[SandboxLayer] = Field(description="the layers of the sandbox on rank 0's node; empty without jobs")
