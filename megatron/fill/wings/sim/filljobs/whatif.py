"""A real run, scaled up: its kinds of jobs, an endless supply of them, and how well its bubbles were used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_json
from megatron.fill.profiles import Configuration, JobProfile, NodeProfile
from megatron.fill.report.schema import JobReport
from megatron.fill.report.timeuse import TimeUse
from megatron.fill.wings.sim.recorded.groups import part_of
from megatron.fill.wings.sim.values import FillKind, SimJob

_REPORT = "a report.json of a run with jobs"
_SEATS = 2  # per device: resident and tail
_NOT_WITH_JOBS = (TimeUse.NO_JOB, TimeUse.NOT_KNOWN)


class _Jobs(BaseModel):
    jobs: tuple[JobReport, ...]


class _Total(BaseModel):
    bubble_share: float | None = None
    time_use_ns: dict[TimeUse, int] = {}


class _Use(BaseModel):
    total: _Total = _Total()


def measured(path: Path) -> tuple[float | None, float | None]:
    """Return two figures of a ``report.json``, each None if it is not there; ConfigError if the report is invalid.

    They are the share of the fillable time in steps, without the time for which no job was there; and bubbles' share of
    all training iterations.
    """
    total = part_of(path, read_json(path, _REPORT), _Use, _REPORT).total
    with_jobs_ns = sum(ns for use, ns in total.time_use_ns.items() if use not in _NOT_WITH_JOBS)
    steps_ns = total.time_use_ns.get(TimeUse.STEPS, 0)
    return steps_ns / with_jobs_ns if steps_ns > 0 else None, total.bubble_share


def kinds_of_report(path: str | Path) -> tuple[FillKind, ...]:
    """Return a kind for each job of a ``report.json`` that did steps, with the mean step as its only node.

    Steps are assumed to be as fast alone as in bubbles, because the report has no times of jobs alone; a step's memory
    is unknown and assumed to be 0.  ConfigError if the report is invalid, with file and field, or no job did a step.
    """
    jobs = part_of(path, read_json(path, _REPORT), _Jobs, _REPORT).jobs
    kinds = {}
    for job in jobs:
        if job.steps and job.harvested_s > 0 and job.work_done > 0:
            node = NodeProfile("step", round(job.harvested_s / job.steps * 1e9), 0)
            profile = JobProfile(Configuration(), (node,), job.work_done / job.steps)
            kinds[job.name] = FillKind(job.name, job.unit, (profile,), job.work_done / job.harvested_s)
    if not kinds:
        raise ConfigError(f"{path}: none of its {len(jobs)} jobs did a step in a bubble; expected at least one")
    return tuple(kinds.values())


def jobs_without_end(kinds: Sequence[FillKind], devices: int, duration_s: float) -> tuple[SimJob, ...]:
    """Return a job per seat, of the kinds in rotation, waiting from the start and too long to finish.

    They show the gain from filling if there is always a waiting job.
    """
    return tuple(
        SimJob(number, f"{kind.name}-{number // len(kinds)}", kind.name, 0.0, 2 * kind.alone_rate * duration_s)
        for number in range(_SEATS * devices)
        for kind in (kinds[number % len(kinds)],)
    )
