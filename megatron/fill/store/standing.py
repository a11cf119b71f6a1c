"""The store's state of jobs whose end is not in a run's records."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path

from megatron.fill.errors import JobError, StoreError
from megatron.fill.store import open_store
from megatron.fill.store.port import Job
from megatron.fill.types import JobRecord, JobState

logger = logging.getLogger("pipefill")

_DEVICE = re.compile(r"rank \d+ of (?P<run>.*) on \S+")  # name of a device, as agents report it


def standing(where: str, run_dir: Path, going: bool, names: Collection[str]) -> dict[str, JobRecord]:
    """The current states of the jobs with these names, by name; empty if the store cannot be opened or read.

    Args:
        where: store, as for ``open_store``.
        run_dir: run folder of the run that asks.
        going: True if that run is still running.
        names: names of the jobs.
    """
    try:
        store = open_store(where, create=False)
    except StoreError as error:
        logger.warning("of some jobs the report knows only what their agents wrote: %s", error)
        return {}
    try:
        found = {}
        now_s = store.now_s()
        for name in names:
            try:
                found[name] = _record(store.find(name), run_dir, going, now_s)
            except JobError:
                reason = "it was not submitted; the agents' logs say why"
                found[name] = JobRecord(name, "", JobState.QUEUED, reason, 0.0, "")
        return found
    except StoreError as error:
        logger.warning("of some jobs the report knows only what their agents wrote: %s", error)
        return {}
    finally:
        store.close()


def _record(job: Job, run_dir: Path, going: bool, now_s: float) -> JobRecord:
    reason = job.reason
    if job.state is JobState.RUNNING:
        reason = _held_by(job, run_dir, going, now_s)
    elif job.state is JobState.QUEUED:
        reason = reason or "no rank has been free for it"
    return JobRecord(
        job.name,
        job.work.what,
        job.state,
        reason,
        0.0,
        job.progress.unit,
        directory=job.directory,
    )


def _held_by(job: Job, run_dir: Path, going: bool, now_s: float) -> str:
    """The reason why a job is RUNNING although this run has no record of its end."""
    match = _DEVICE.fullmatch(job.device)
    if match is not None and match["run"] != str(run_dir.resolve()):
        return f"another run has it: {job.device}"
    if job.lost(now_s):
        return "its agent is gone; it goes on when a training serves its store again"
    return "" if going else "its agent was killed; it goes back to the queue when the lease ends"
