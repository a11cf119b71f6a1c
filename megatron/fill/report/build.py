"""From the raw records of a run to its report.

A worker whose rank left no record counts in no ratio: its bubbles are not known.  Its job is listed all the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from megatron.fill.report.cycle import bubble_cycle
from megatron.fill.report.schema import (
    BrakeReport,
    JobReport,
    JobSummary,
    PairedTimes,
    Percentiles,
    RankReport,
    Report,
    Summary,
    Times,
    Totals,
    Work,
)
from megatron.fill.report.slowdown import paired_slowdown
from megatron.fill.types import Bubble, BubbleKind, Iteration, JobRecord, RankRecord, WorkerRecord

_S = 1e9  # nanoseconds
_MS = 1e6
_US = 1e3


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's record with the workers that ran in its bubbles."""

    record: RankRecord
    workers: list[WorkerRecord]

    def training_bubbles(self) -> list[Bubble]:
        """Those of iterations that ended; what a broken-off iteration left has no iteration time to be a share of.

        Sums that stand for older bubbles (index -1) are of ended iterations."""
        ended = {item.iteration for item in self.record.iterations}
        return [
            bubble
            for bubble in self.record.bubbles
            if not bubble.forward_only and (bubble.iteration in ended or bubble.index < 0)
        ]

    def fillable_ns(self) -> int:
        return sum(bubble.duration_ns for bubble in self.record.bubbles if bubble.filling)


def build_report(
    ranks: Sequence[RankRecord], workers: Sequence[WorkerRecord], jobs: Sequence[JobRecord], command: str
) -> Report:
    """Build the report of a run from what its ranks and agents recorded.

    Args:
        ranks: one record per rank, in any order.
        workers: of all agents; several may share a rank or a job (one ran after the other).
        jobs: of all agents.
        command: the main job's command line.
    """
    by_rank: defaultdict[int, list[WorkerRecord]] = defaultdict(list)
    for worker in workers:
        by_rank[worker.rank].append(worker)
    ordered = sorted(ranks, key=lambda record: record.info.rank)
    parts = [_Part(record, by_rank[record.info.rank]) for record in ordered]
    units = {job.name: job.unit for job in jobs}
    total = _totals(parts, units)
    job_reports = [_job(job) for job in jobs]
    summary = Summary(
        iterations=total.iterations,
        bubble_share=total.bubble_share,
        harvest_ratio=total.harvest_ratio,
        fill_efficiency=total.fill_efficiency,
        slowdown=paired_slowdown(_mean_iterations(ordered)),
        brakes=max((len(record.brakes) for record in ranks), default=0),
        open_to_step_us=total.open_to_step_us,
        overrun_us=total.overrun_us,
        jobs=[JobSummary(**job.model_dump(include=set(JobSummary.model_fields))) for job in job_reports],
    )
    return Report(
        command=command,
        summary=summary,
        ranks=[_rank(part, units) for part in parts],
        total=total,
        jobs=job_reports,
        cycle=[bubble_cycle(record) for record in ordered],
    )


def fill_efficiency(parts: Iterable[tuple[int, Sequence[WorkerRecord]]]) -> float | None:
    """Work per fillable second, relative to the same task's work per second with the device to itself.

    Workers that ran one after the other on a rank share its fillable seconds in proportion to what they harvested
    (equally, if none harvested anything).  A worker without a measurement alone is left out together with its share.
    Each worker's ratio counts by its share, so the mean is: seconds that the work would have taken alone / the
    fillable seconds it was done in.

    Args:
        parts: per rank, its fillable nanoseconds and its workers.
    """
    alone_ns = shares_ns = 0.0
    for fillable_ns, workers in parts:
        harvested = sum(worker.harvested_ns for worker in workers)
        for worker in workers:
            if worker.alone_ns <= 0 or worker.alone_work <= 0:
                continue
            alone_ns += _finite(worker.work_done) * worker.alone_ns / worker.alone_work
            shares_ns += fillable_ns * (worker.harvested_ns / harvested if harvested else 1 / len(workers))
    return _ratio(alone_ns, shares_ns)


def _rank(part: _Part, units: dict[str, str]) -> RankReport:
    info = part.record.info
    return RankReport(
        **_totals([part], units).model_dump(),
        rank=info.rank,
        stage=info.stage,
        node=info.node,
        device=info.device,
        data_parallel_rank=info.data_parallel_rank,
        tensor_parallel_rank=info.tensor_parallel_rank,
        brakes=[
            BrakeReport(
                iteration=event.iteration,
                slowdown=event.slowdown,
                pairs=event.pairs,
                until=event.until,
                guard_ms=event.guard_ns / _MS,
            )
            for event in part.record.brakes
        ],
    )


def _totals(parts: Sequence[_Part], units: dict[str, str]) -> Totals:
    iterations = [item for part in parts for item in part.record.iterations]
    training = [bubble for part in parts for bubble in part.training_bubbles()]
    bubbles = [bubble for part in parts for bubble in part.record.bubbles]
    workers = [worker for part in parts for worker in part.workers]
    uses = [use for worker in workers for use in worker.uses]
    iteration_ns = sum(item.end_ns - item.start_ns for item in iterations)
    fillable_ns = sum(part.fillable_ns() for part in parts)
    harvested_ns = sum(worker.harvested_ns for worker in workers)
    errors = [abs(bubble.predicted_ns - bubble.duration_ns) for bubble in bubbles if bubble.predicted_ns > 0]
    return Totals(
        iterations=max((len(part.record.iterations) for part in parts), default=0),
        iteration_s=iteration_ns / _S,
        iteration_time=_times(iterations),
        bubble_s=_by_kind(training),
        bubble_share=_ratio(sum(bubble.duration_ns for bubble in training), iteration_ns),
        evaluation_bubble_s=_by_kind(bubble for bubble in bubbles if bubble.forward_only),
        fillable_s=fillable_ns / _S,
        harvested_s=harvested_ns / _S,
        harvest_ratio=_ratio(harvested_ns, fillable_ns),
        fill_efficiency=fill_efficiency((part.fillable_ns(), part.workers) for part in parts),
        steps=sum(worker.steps_done for worker in workers),
        work=_work(workers, units),
        open_to_step_us=_percentiles([use.latency_ns for use in uses if use.latency_ns >= 0]),
        overrun_us=_percentiles([use.overrun_ns for use in uses if use.steps > 0]),
        paired=_paired(iterations),
        predicted_bubbles=len(errors),
        prediction_error_ms=fmean(errors) / _MS if errors else None,
    )


def _work(workers: Iterable[WorkerRecord], units: dict[str, str]) -> list[Work]:
    by_job: defaultdict[str, list[WorkerRecord]] = defaultdict(list)
    for worker in workers:
        by_job[worker.job].append(worker)
    return [
        Work(
            job=job,
            work_done=sum(_finite(worker.work_done) for worker in its),
            unit=units.get(job, ""),
            steps=sum(worker.steps_done for worker in its),
            harvested_s=sum(worker.harvested_ns for worker in its) / _S,
        )
        for job, its in by_job.items()
    ]


def _job(job: JobRecord) -> JobReport:
    return JobReport(
        name=job.name,
        state=job.state,
        reason=job.reason,
        work_done=_finite(job.work_done),
        unit=job.unit,
        what=job.what,
        rank=job.rank,
        steps=job.steps,
        harvested_s=job.harvested_s,
        rate=_ratio(_finite(job.work_done), job.harvested_s),
        total_work=job.total_work if job.total_work is None or math.isfinite(job.total_work) else None,
        result=job.result,
        directory=job.directory,
    )


def _mean_iterations(ranks: Sequence[RankRecord]) -> list[Iteration]:
    """The main job's iterations: times are means over the ranks, whose clocks need not agree."""
    seen: defaultdict[int, list[Iteration]] = defaultdict(list)
    for record in ranks:
        for item in record.iterations:
            seen[item.iteration].append(item)
    return [
        Iteration(number, 0, round(fmean(item.end_ns - item.start_ns for item in its)), its[0].filling, its[0].block)
        for number, its in sorted(seen.items())
        if len(its) == len(ranks)
    ]


def _paired(iterations: Iterable[Iteration]) -> PairedTimes | None:
    inside = [item for item in iterations if item.block >= 0]
    if not inside:
        return None
    return PairedTimes(
        on=_times([item for item in inside if item.filling]),
        off=_times([item for item in inside if not item.filling]),
    )


def _times(iterations: Sequence[Iteration]) -> Times | None:
    if not iterations:
        return None
    seconds = np.array([item.end_ns - item.start_ns for item in iterations]) / _S
    p50, p99 = np.percentile(seconds, [50, 99])
    return Times(count=len(seconds), mean_s=float(seconds.mean()), median_s=float(p50), p99_s=float(p99))


def _percentiles(values_ns: Sequence[int]) -> Percentiles | None:
    if not values_ns:
        return None
    p50, p99, largest = np.percentile(np.array(values_ns) / _US, [50, 99, 100])
    return Percentiles(count=len(values_ns), p50=float(p50), p99=float(p99), max=float(largest))


def _by_kind(bubbles: Iterable[Bubble]) -> dict[BubbleKind, float]:
    sums = dict.fromkeys(BubbleKind, 0)
    for bubble in bubbles:
        sums[bubble.kind] += bubble.duration_ns
    return {kind: nanoseconds / _S for kind, nanoseconds in sums.items()}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _finite(work: float) -> float:
    """A task counts its own work and may count NaN; such a count is worth nothing."""
    return work if math.isfinite(work) else 0.0
