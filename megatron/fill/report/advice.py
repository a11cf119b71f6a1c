"""The reason why a run filled nothing, from the report's measured figures alone, and a sentence of advice."""

from __future__ import annotations

from enum import Enum

from megatron.fill.display import counted
from megatron.fill.records.segment import SegmentEnding
from megatron.fill.report.schema import Report
from megatron.fill.report.timeuse import TimeUse
from megatron.fill.types import JobState

_WITHOUT_SUCCESS = {JobState.FAILED, JobState.CANCELLED}


class Unfilled(Enum):
    """Reasons why nothing was filled, in the order in which they are checked; each with its sentence for the user."""

    NOTHING_RECORDED = "no rank has written an iteration down, which each does after every few; {later}"
    ONE_STAGE = "a training in one pipeline stage has no bubbles; --pipeline-model-parallel-size 2 or more makes some"
    NO_BUBBLES = (
        "no bubble was seen in {iterations}; the schedule is not one that PipeFill knows, and megatron.fill.bubble "
        "marks bubbles by hand"
    )
    NO_JOBS = "there were no jobs; pipefill submit JOBS.yaml --store {store} adds some"
    BRAKED = (
        "the automatic brake was on whenever bubbles could have been filled; --fill-max-slowdown says what it allows"
    )
    WARMING_UP = (
        "bubbles are open to jobs after {warmup} iterations (warmup_iterations), and of no start of the "
        "training more than {most} were recorded; {then}"
    )
    EVALUATED_LITTLE = (
        "a training without iterations (--skip-train) has bubbles in evaluations only, which are open to jobs after "
        "{warmup} batches (warmup_iterations); more --eval-iters help"
    )
    PAUSED = "pipefill pause or kill was on whenever bubbles could have been filled; pipefill resume ends it"
    FAILED = "of {jobs} none ended well or goes on; the reasons are above"
    NOT_STARTED = "of {jobs} none was started. The reasons are above; where it is that no rank was free, {then}"
    NOT_READY = (
        "of {attempts} none came further than the start of its worker, which takes seconds where cores are busy; {then}"
    )
    LONG_STEPS = (
        "the jobs' next steps did not fit. The longest bubbles are of {longest}, and steps have to be shorter; "
        "pipefill profile and plan tell what fits"
    )
    LARGE_STEPS = (
        "the jobs' next steps need more memory than the training leaves in bubbles; pipefill plan tells how much it is"
    )
    LATE = "the jobs were there, and bubbles had ended before they got to a step; cores that others keep busy do that"
    SHORT_BUBBLES = (
        "bubbles were too short to be opened. The longest are of {longest}; the setting min_bubble_us says from when "
        "on they are"
    )
    NOT_PREDICTED = "most bubbles could not be predicted yet; {then}"
    NO_STEP = "jobs had begun, and had no step to run; the reasons are above"


def cause(report: Report) -> Unfilled | None:
    """Return the reason why a run that served jobs filled nothing; None if it filled something, or served no jobs."""
    total = report.total
    if not any(segment.store for segment in report.segments) or total.steps:
        return None
    filled_s = total.fillable_s + total.settling_s
    bubble_s = total.bubble_s if total.iterations else total.evaluation_bubble_s
    if not sum(bubble_s.values()) and not (filled_s and total.iterations):
        if len(report.stages) == 1:
            return Unfilled.ONE_STAGE
        return Unfilled.NO_BUBBLES if total.iterations else Unfilled.NOTHING_RECORDED
    if not report.jobs:
        return Unfilled.NO_JOBS
    return _of_jobs(report) if filled_s else _never_open(report)


def _never_open(report: Report) -> Unfilled:
    if not report.total.iterations:
        return Unfilled.PAUSED if report.total.predicted_bubbles else Unfilled.EVALUATED_LITTLE
    if all(segment.warmup is None or segment.iterations <= segment.warmup for segment in report.segments):
        return Unfilled.WARMING_UP
    return Unfilled.BRAKED if any(rank.brakes for rank in report.ranks) else Unfilled.PAUSED


def _of_jobs(report: Report) -> Unfilled:
    """Return the reason why no step ran although bubbles were fillable."""
    attempts = [attempt for job in report.jobs for attempt in job.attempts]
    if all(job.state in _WITHOUT_SUCCESS for job in report.jobs):
        return Unfilled.FAILED
    if not attempts:
        return Unfilled.NOT_STARTED
    if all(attempt.ready_s is None for attempt in attempts):
        return Unfilled.NOT_READY
    use = report.total.time_use_ns
    past_ns = use[TimeUse.PAST_PREDICTION] if use[TimeUse.LITTLE_TIME] else 0  # else it is of gates that stayed shut
    there = {
        Unfilled.LONG_STEPS: use[TimeUse.LITTLE_TIME] + use[TimeUse.HELD] + past_ns,
        Unfilled.LARGE_STEPS: use[TimeUse.LITTLE_MEMORY],
        Unfilled.LATE: use[TimeUse.RUNTIME] + use[TimeUse.MISSED],
    }
    if any(there.values()):
        return max(there, key=lambda cause: there[cause])
    largest = max(use, key=lambda one: use[one])
    return {TimeUse.NOT_PREDICTED: Unfilled.NOT_PREDICTED, TimeUse.TOO_SHORT: Unfilled.SHORT_BUBBLES}.get(
        largest, Unfilled.NO_STEP
    )


def advice(report: Report) -> str:
    """Return one sentence for the user of a run that served jobs and filled nothing; empty for any other run."""
    found = cause(report)
    return "" if found is None else f"nothing was filled: {found.value.format(**_figures(report))}"


def _figures(report: Report) -> dict[str, str]:
    last = report.segments[-1]
    cycles = [cycle.training if report.total.iterations else cycle.evaluation for cycle in report.cycle]
    longest = max((bubble.median_ms for cycle in cycles for bubble in cycle), default=0.0)
    attempts = sum(len(job.attempts) for job in report.jobs)
    return {
        "iterations": counted(report.total.iterations, "iteration"),
        "warmup": str(max(segment.warmup or 0 for segment in report.segments)),
        "most": str(max(segment.iterations for segment in report.segments)),
        "jobs": counted(len(report.jobs), "job"),
        "attempts": counted(attempts, "attempt"),
        "store": next(segment.store for segment in reversed(report.segments) if segment.store),
        "longest": f"{longest:.1f} ms",
        "then": "the training goes on" if last.ending is SegmentEnding.RUNNING else "a longer training helps",
        "later": "ask again later" if last.ending is SegmentEnding.RUNNING else "the training was over before",
    }
