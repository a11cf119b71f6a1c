"""Kinds of jobs from a real run's report, and an endless supply of them: to scale a run up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_json
from megatron.fill.given.problems import explain
from megatron.fill.profiles import Configuration, JobProfile, NodeProfile
from megatron.fill.report.schema import JobReport
from megatron.fill.wings.sim.values import FillKind, SimJob

_SEATS = 2  # per device: resident and tail


class _Jobs(BaseModel):
    """The part of a report that is needed."""

    model_config = ConfigDict(frozen=True)

    jobs: tuple[JobReport, ...]


def kinds_of_report(path: str | Path) -> tuple[FillKind, ...]:
    """Return a kind for each job of a ``report.json`` that did steps, with the mean step as its only node.

    Steps are assumed to be as fast alone as in bubbles, because the report has no times of jobs alone; a step's memory
    is unknown and assumed to be 0.

    Raises:
        ConfigError: the report is invalid, with file and field; or no job did a step.
    """
    data = read_json(path, "a report.json")
    try:
        jobs = _Jobs.model_validate(data).jobs
    except ValidationError as error:
        suffix = "; expected a report.json"
        raise ConfigError(explain(error, _Jobs, lambda place: (str(path), place), suffix, most=1)) from error
    kinds = {}
    for job in jobs:
        if job.steps and job.harvested_s > 0 and job.work_done > 0:
            step_ns = round(job.harvested_s / job.steps * 1e9)
            node = NodeProfile("step", step_ns, 0)
            profile = JobProfile(Configuration(), (node,), job.work_done / job.steps)
            rate = job.work_done / job.harvested_s
            kinds[job.name] = FillKind(job.name, job.unit, (profile,), rate, f"measured: {path}")
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
