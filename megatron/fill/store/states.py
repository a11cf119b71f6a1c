"""The store's state of jobs whose end is not in a run's records."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from pathlib import Path

from megatron.fill.errors import JobError, StoreError
from megatron.fill.status import Cause, JobState, Status
from megatron.fill.store import open_store
from megatron.fill.store.values import Job
from megatron.fill.types import JobRecord

logger = logging.getLogger("pipefill")


def current_states(where: str, run_dir: Path, going: bool, names: Collection[str]) -> dict[str, JobRecord]:
    """The current states of the jobs with these names, by name; empty if the store cannot be opened or read.

    ``going`` is True if the run that asks, in ``run_dir``, is still running.
    """
    found: dict[str, JobRecord] = {}
    jobs: dict[str, Job] = {}
    try:
        with closing(open_store(where, create=False)) as store:
            now_s = store.now_s()
            for name in names:
                try:
                    jobs[name] = store.find(name)
                except JobError:
                    found[name] = JobRecord(name, "", Status(JobState.QUEUED, Cause.NOT_SUBMITTED), 0.0, "")
            states = store.states({first for job in jobs.values() for first in job.work.after})
    except StoreError as error:
        logger.warning("of some jobs the report knows only what their agents wrote: %s", error)
        return {}
    for name, job in jobs.items():
        status = job.status
        if job.state is JobState.RUNNING:
            status = _held_by(job, run_dir, going, now_s)
        elif status == Status(JobState.QUEUED):
            rest = not_succeeded(job.work.after, states)
            more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
            status = Status(JobState.QUEUED, Cause.AFTER if rest else Cause.NO_RANK_FREE, "".join(rest[:1]) + more)
        found[name] = JobRecord(job.name, job.work.what, status, 0.0, job.progress.unit, directory=job.directory)
    return found


def not_succeeded(names: Iterable[str], states: Mapping[str, JobState]) -> list[str]:
    """List the jobs with these names that have not succeeded, each with its state; unknown ones are left out."""
    return [
        f"{name} ({states[name]})" for name in names if states.get(name, JobState.SUCCEEDED) is not JobState.SUCCEEDED
    ]


def _held_by(job: Job, run_dir: Path, going: bool, now_s: float) -> Status:
    """The status of a job that is RUNNING although this run has no record of its end."""
    if job.run not in ("", str(run_dir.resolve())):
        return Status(JobState.RUNNING, Cause.ELSEWHERE, job.device)
    if job.lost(now_s):
        return Status(JobState.RUNNING, Cause.AGENT_LOST)
    return Status(JobState.RUNNING, Cause.NONE if going else Cause.AGENT_KILLED)
