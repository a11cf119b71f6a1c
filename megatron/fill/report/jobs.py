"""The report of each job of a run, from the records of its attempts and from the job store."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.fill.records.segment import Segment, SegmentEnding
from megatron.fill.report.part import finite
from megatron.fill.report.schema import AttemptReport, JobReport
from megatron.fill.report.tally import ratio
from megatron.fill.status import Cause, JobState, Status
from megatron.fill.types import JobRecord

type Ask = Callable[[Collection[str]], Mapping[str, JobRecord]]  # looks up jobs in the job store, by name

_CUT = Status(JobState.RUNNING, Cause.AGENT_GONE)
_UNKNOWN = Status(JobState.QUEUED, Cause.UNKNOWN)


def job_reports(segments: Sequence[Segment], attempts: Sequence[tuple[int, JobRecord]], ask: Ask) -> list[JobReport]:
    """Return a report for every job that an agent took or that a jobs file of the run names.

    ``attempts`` are the segment's number and the job's record for each; ``ask`` looks up jobs whose end is not in them.
    """
    going = {segment.number for segment in segments if segment.ending is SegmentEnding.RUNNING}
    merged: dict[tuple[str, str], tuple[JobRecord, list[AttemptReport]]] = {}
    for number, job in sorted(attempts, key=lambda one: (one[1].ended_s, one[0])):
        before, its = merged.get((job.name, job.directory), (None, []))
        its.append(_attempt(number, job))
        if job.state is JobState.RUNNING and number not in going:
            job = replace(job, status=_CUT)
        merged[job.name, job.directory] = job if before is None else _sum(before, job), its
    known = {name for name, _ in merged}
    missing = list(dict.fromkeys(name for segment in segments for name in segment.jobs if name not in known))
    open_ended = {job.name for job, _ in merged.values() if _is_open(job)}
    told = ask([*missing, *open_ended]) if missing or open_ended else {}
    reports = [_job(_corrected(job, told), its) for job, its in merged.values()]
    return reports + [_job(told.get(name) or JobRecord(name, "", _UNKNOWN, 0.0, ""), []) for name in missing]


def _sum(before: JobRecord, job: JobRecord) -> JobRecord:
    """Return the later record, with the sums of both."""
    sums = {name: getattr(before, name) + getattr(job, name) for name in ("work_done", "steps", "harvested_s")}
    return replace(job, **sums)


def _is_open(job: JobRecord) -> bool:
    """True if the job's agent died first, or could not tell the store its end, which may have been done again since."""
    return job.status == _CUT or job.status.unheard


def _corrected(job: JobRecord, told: Mapping[str, JobRecord]) -> JobRecord:
    """Return the record with the store's state and reason if its end is open and the store has the same job."""
    now = told.get(job.name)
    if not _is_open(job) or now is None or now.directory != job.directory:
        return job
    return replace(job, status=now.status)


def _outcome(job: JobRecord) -> dict[str, Any]:
    return {
        "rank": job.rank,
        "state": job.state,
        "cause": job.status.cause,
        "reason": job.reason,
        "work_done": finite(job.work_done),
        "steps": job.steps,
        "harvested_s": job.harvested_s,
    }


def _attempt(number: int, job: JobRecord) -> AttemptReport:
    ready_s = (job.ready_ns - job.started_ns) / 1e9 if job.ready_ns else None
    return AttemptReport(segment=number, ready_s=ready_s, **_outcome(job))


def _job(job: JobRecord, attempts: list[AttemptReport]) -> JobReport:
    return JobReport(
        **_outcome(job),
        name=job.name,
        unit=job.unit,
        what=job.what,
        rate=ratio(finite(job.work_done), job.harvested_s),
        total_work=job.total_work if job.total_work is None or math.isfinite(job.total_work) else None,
        side_throughput=job.side_throughput,
        result=job.result,
        directory=job.directory,
        attempts=attempts,
    )
