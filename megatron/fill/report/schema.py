"""The models of ``report.json`` and of the bubble-cycle file.  ``docs/report.md`` explains them to a reader.

A name ends in its unit (``_s``, ``_ms``, ``_us``, ``_ns``, ``_bytes``); a value that cannot be known is null, never
NaN.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from megatron.fill.records import SegmentEnding
from megatron.fill.report.timeuse import TimeUse
from megatron.fill.types import BubbleKind, JobState

SCHEMA_VERSION = 2


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Slowdown(_Model):
    """How much slower the main job's iterations are with something than without, from pairs of neighbours."""

    mean: float = Field(description="mean over the pairs of (time with / time without) - 1; 0.01 is 1%")
    ci95: tuple[float, float] = Field(description="95% bootstrap interval of the mean over the pairs: [low, high]")
    pairs: int = Field(description="how many pairs there are")


class Percentiles(_Model):
    """The distribution of a short time, in microseconds."""

    count: int = Field(description="how many values there are")
    p50: float = Field(description="median")
    p99: float = Field(description="99th percentile")
    max: float = Field(description="largest")


class Times(_Model):
    """The distribution of iteration times."""

    count: int = Field(description="how many iterations")
    mean_s: float = Field(description="mean seconds")
    median_s: float = Field(description="median seconds")
    p99_s: float = Field(description="99th percentile, seconds")


class PairedTimes(_Model):
    """The iteration times inside the paired blocks, split by whether filling was on."""

    on: Times | None = Field(description="iterations with filling on")
    off: Times | None = Field(description="iterations with filling off, watched")


class WorkReport(_Model):
    """What one job did in the bubbles of one rank (in the total: of all ranks)."""

    job: str = Field(description="the job's name")
    work_done: float = Field(description="work done in bubbles, in the job's unit")
    unit: str = Field(description="the unit of work, as the task names it")
    steps: int = Field(description="steps done in bubbles")
    harvested_s: float = Field(description="seconds inside steps and inside bubbles")


class Totals(_Model):
    """The figures of one rank, or of all ranks together."""

    iterations: int = Field(description="training iterations; in the total, the most of any rank")
    iteration_s: float = Field(description="seconds in training iterations; in the total, summed over ranks")
    iteration_time: Times | None = Field(description="training iteration times; in the total, of all ranks pooled")
    bubble_s: dict[BubbleKind, float] = Field(description="seconds of bubbles in training iterations, by kind")
    bubble_share: float | None = Field(description="sum of bubble_s / iteration_s")
    evaluation_bubble_s: dict[BubbleKind, float] = Field(description="seconds of bubbles in evaluations, by kind")
    fillable_s: float = Field(
        description="seconds of bubbles, training and evaluation, while filling was on and jobs had settled"
    )
    settling_s: float = Field(default=0.0, description="seconds of those before that, in no other figure of filling")
    harvested_s: float | None = Field(
        description="seconds inside side-task steps and inside fillable bubbles, as far as known; null if of no rank"
    )
    harvest_ratio: float | None = Field(description="harvested_s / fillable_s, of ranks whose harvest is known")
    fill_efficiency: float | None = Field(description="work per fillable second / work per second alone")
    time_use_ns: dict[TimeUse, int] = Field(description="the nanoseconds of fillable_s, by what became of them")
    steps: int = Field(description="side-task steps done in bubbles")
    work: list[WorkReport] = Field(description="what each job did here")
    open_to_step_us: Percentiles | None = Field(description="from a gate's opening to the start of the first step")
    overrun_us: Percentiles | None = Field(description="how long the last step ran on after its bubble; 0 counts")
    paired: PairedTimes | None = Field(description="iteration times with filling on and off, inside paired blocks")
    predicted_bubbles: int = Field(description="bubbles whose duration was predicted when they opened")
    prediction_error_ms: float | None = Field(description="mean absolute error of those predictions")


class BrakeReport(_Model):
    """The automatic brake stopped the filling of one rank: the training was slower than --fill-max-slowdown."""

    iteration: int = Field(description="the last iteration before it")
    slowdown: float = Field(description="of the training, as measured then; 0.03 is 3%")
    pairs: int = Field(description="stretches with and without filling that it was measured over")
    until: int = Field(description="the iteration that was to be filled again")
    guard_ms: float = Field(description="kept free at the end of every predicted bubble from then on")


class RankReport(Totals):
    """The figures of one rank of the main job."""

    rank: int = Field(description="the rank in the main job")
    stage: int = Field(description="its pipeline stage, from 0")
    node: int = Field(description="the node that it runs on, from 0")
    device: str = Field(description="its device")
    data_parallel_rank: int = Field(description="its place in data parallelism")
    tensor_parallel_rank: int = Field(description="its place in tensor parallelism")
    harvest_unknown: str = Field(default="", description="why its harvest is not known, or not of all segments")
    brakes: list[BrakeReport] = Field(description="each time that the automatic brake stopped its filling")


class StageReport(Totals):
    """The figures of one pipeline stage: of all ranks that ran it."""

    stage: int = Field(description="the stage, from 0")
    ranks: int = Field(description="how many ranks ran it")


class CycleBubble(_Model):
    """One bubble of the cycle: the same place in every iteration."""

    index: int = Field(description="its place in the cycle, from 0")
    kind: BubbleKind = Field(description="where in the iteration: fill, fwd-bwd, interior or drain")
    mean_ms: float = Field(description="mean duration")
    median_ms: float = Field(description="median duration")
    p10_ms: float = Field(description="10th percentile of the duration")
    p90_ms: float = Field(description="90th percentile of the duration")
    offset_ms: float = Field(
        description="median time from the start of the iteration (evaluation: of its first bubble) to this bubble"
    )
    share: float | None = Field(description="mean duration / mean iteration time; null in evaluations")
    free_bytes: int = Field(description="least device memory that the main job left free; 0 if not measured")
    count: int = Field(description="iterations that the figures are from")


class RankCycle(_Model):
    """The bubble cycle of one rank."""

    rank: int = Field(description="the rank in the main job")
    stage: int = Field(description="its pipeline stage, from 0")
    iteration_ms: float | None = Field(description="mean time of the iterations that the cycle is from")
    training: list[CycleBubble] = Field(description="the bubbles of a training iteration, in order")
    evaluation: list[CycleBubble] = Field(description="the bubbles of an evaluation iteration, in order")


class Cycles(_Model):
    """The file that ``--fill-profile-only`` writes."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="version of this schema")
    ranks: list[RankCycle] = Field(description="the bubble cycle of each rank")


class JobSummary(_Model):
    """How one fill job ended, in short."""

    name: str = Field(description="the job's name")
    state: JobState = Field(description="QUEUED, RUNNING, SUCCEEDED, FAILED or CANCELLED")
    reason: str = Field(description="why it is in this state")
    work_done: float = Field(description="work done, in its unit")
    unit: str = Field(description="the unit of work, as the task names it")


class AttemptReport(_Model):
    """One attempt at a fill job: from when an agent took it to when it gave it back, or ended."""

    segment: int = Field(description="the segment of the run that it was in")
    rank: int | None = Field(description="the rank whose bubbles it ran in")
    state: JobState = Field(description="what came of it; QUEUED: it was to go on later")
    reason: str = Field(description="why")
    ready_s: float | None = Field(
        default=None, description="from the start of its worker until the job itself began; null if it never did"
    )
    work_done: float = Field(description="work done in it, in the job's unit")
    steps: int = Field(description="steps done in it")
    harvested_s: float = Field(description="seconds inside its steps and inside bubbles")


class JobReport(JobSummary):
    """How one fill job ended, in full."""

    what: str = Field(description="module:Class, or the command line")
    rank: int | None = Field(description="the rank whose bubbles it ran in; null if it never started")
    steps: int = Field(description="steps done")
    harvested_s: float = Field(description="seconds inside its steps and inside bubbles")
    rate: float | None = Field(description="work_done / harvested_s")
    total_work: float | None = Field(description="how much there was to do; null if the task did not say")
    side_throughput: float | None = Field(
        default=None, description="its work per second on a side device, if the user stated it"
    )
    result: dict[str, Any] = Field(description="what the task reported")
    directory: str = Field(description="its folder, with the task's own files")
    attempts: list[AttemptReport] = Field(default=[], description="each attempt at it in this run, in their order")


class HourPrices(_Model):
    """What an hour costs, in any currency."""

    main: float = Field(description="of all that the training runs on, together")
    side: float = Field(description="of one side device: a cheaper one, on which the side work would otherwise run")


class SideWork(_Model):
    """What a job's work in bubbles comes to on a side device."""

    job: str = Field(description="the job's name")
    throughput: float | None = Field(description="work per second on a side device; null if not known")
    measured: bool = Field(
        description="it is not stated by the user but the job's rate alone, on the main job's device"
    )
    side_s: float | None = Field(description="seconds of a side device that the work would take; null if not known")


class Cost(_Model):
    """What filling cost the training, and what it saved (FreeRide, arXiv 2409.06941)."""

    with_s: float | None = Field(description="T_with: time of the training in iterations with filling; null for none")
    without_s: float | None = Field(description="T_without: with_s / (1 + time_increase)")
    time_increase: float | None = Field(description="I: the mean slowdown; null without --fill-paired-blocks")
    time_increase_ci95: tuple[float, float] | None = Field(description="its 95% interval")
    saving: float | None = Field(description="S: of what the training costs without filling; null if not known")
    saving_ci95: tuple[float, float] | None = Field(description="S over the interval of time_increase")
    prices: HourPrices | None = Field(description="as given; null for none")
    work: list[SideWork] = Field(description="of each job that did some, what its work comes to")
    lacking: list[str] = Field(description="what is missing to know the saving; empty if it is known")


class Summary(_Model):
    """The run in a few figures."""

    iterations: int = Field(description="training iterations of the main job")
    bubble_share: float | None = Field(description="bubble seconds / iteration seconds, over all ranks")
    harvest_ratio: float | None = Field(description="harvested seconds / fillable bubble seconds, over all ranks")
    fill_efficiency: float | None = Field(description="work per fillable second / work per second alone")
    slowdown: Slowdown | None = Field(
        description="by filling: medians of a block with it and one without; null without --fill-paired-blocks"
    )
    watching: Slowdown | None = Field(
        description="by watching bubbles: where nothing is filled, against iterations not watched; null without"
    )
    brakes: int = Field(description="how often the automatic brake stopped the filling, on the rank where most often")
    open_to_step_us: Percentiles | None = Field(description="from a gate's opening to the start of the first step")
    overrun_us: Percentiles | None = Field(description="how long the last step ran on after its bubble; 0 counts")
    jobs: list[JobSummary] = Field(description="how each job ended")


class Wall(_Model):
    """One of the walls of the kernel around jobs."""

    name: str = Field(description="as pipefill doctor names it")
    lacks: str = Field(description="why it did not stand; empty where it did")


class SegmentReport(_Model):
    """One segment of the run: each time that its training was started."""

    number: int = Field(description="from 1; the name of its folder in records/")
    ending: SegmentEnding = Field(description="how it ended: by itself, failed, cut off, or running if it has not")
    started_s: float = Field(description="when it was started, in seconds since 1970")
    ended_s: float | None = Field(description="when it ended, in seconds since 1970; null if it did not say so")
    ranks: int = Field(description="how many ranks it had")
    recorded: int = Field(description="how many of them left a record")
    iterations: int = Field(description="training iterations that were recorded; the most of any rank")
    first_iteration: int | None = Field(description="the number of the first one; null if there is none")
    last_iteration: int | None = Field(description="the number of the last one; null if there is none")
    store: str = Field(description="the job store that it served, without passwords; empty for none")
    warmup: int | None = Field(default=None, description="iterations before it filled; null where no job was served")
    paired_blocks: int = Field(default=0, description="iterations of a block with or without filling; 0: no blocks")
    command: str = Field(description="the command line of the main job")
    lost_until: int | None = Field(
        default=None, description="its records up to this iteration were deleted while it ran; null: none were"
    )
    unwritten: list[int] = Field(default=[], description="ranks with records in this report that are in no file")
    cut: list[int] = Field(default=[], description="those of them that had more than could be kept in memory")


class Report(_Model):
    """``report.json``."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="version of this schema")
    command: str = Field(description="the command line of the main job, in the last segment")
    segments: list[SegmentReport] = Field(description="each time that the training was started")
    summary: Summary = Field(description="the run in a few figures")
    ranks: list[RankReport] = Field(description="the figures of each rank")
    stages: list[StageReport] = Field(description="the figures of each pipeline stage")
    total: Totals = Field(description="the figures of all ranks together")
    cost: Cost = Field(description="what filling cost the training, and what it saved")
    jobs: list[JobReport] = Field(description="how each fill job ended")
    cycle: list[RankCycle] = Field(description="the bubble cycle of each rank")
    walls: list[Wall] = Field(description="the walls around jobs on rank 0's node; empty without jobs")
