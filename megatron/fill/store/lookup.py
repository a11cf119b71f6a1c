"""Looking up jobs, checking whether they are free, and the messages for missing ones, in one transaction."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence, Set

from megatron.fill.errors import JobError
from megatron.fill.store import checks
from megatron.fill.store.transaction import Transaction
from megatron.fill.store.values import Claim, Job
from megatron.fill.types import JobState

ASK_S = 60.0  # time for which a job is reserved for the device that asked for it, since it has to be saved first
NAMES_COMPARED = 10_000


def find(transaction: Transaction, name: str) -> Job:
    """The latest job with that name, or the job with that number.

    Raises:
        JobError: there is none; the message has the closest names.
    """
    job = transaction.latest(checks.storable(name))
    if job is None and name.isdecimal() and checks.possible(int(name)):
        job = transaction.job(int(name))
    if job is not None:
        return job
    raise JobError(f"there is no job {name!r}{closest(name, transaction.names(NAMES_COMPARED))}")


def closest(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest names, or ''."""
    close = difflib.get_close_matches(name, sorted(set(names)))
    return f"; the closest: {', '.join(close)}" if close else ""


def existing(transaction: Transaction, job_id: int) -> Job:
    """The job with that number.

    Raises:
        JobError: there is no such job.
    """
    job = transaction.job(job_id) if checks.possible(job_id) else None
    if job is None:
        raise JobError(f"there is no job {job_id}")
    return job


def held(transaction: Transaction, claim: Claim) -> Job | None:
    """The claimed job if the claim is still valid, else None."""
    job = transaction.job(claim.job.id)
    held = job is not None and (job.state, job.owner, job.attempt) == (JobState.RUNNING, claim.owner, claim.attempt)
    return job if held else None


def first_free(transaction: Transaction, ids: Sequence[int], device: str, full: Set[str] = frozenset()) -> Job | None:
    """The first job of ``ids`` that is QUEUED and not reserved for another device; None if there is none.

    Args:
        full: users of whom no job may begin.
    """
    job = transaction.first_queued(ids)
    while job is not None and (
        job.user in full or (job.asked_by != checks.storable(device) and awaited(transaction, job))
    ):
        ids = ids[ids.index(job.id) + 1 :]
        job = transaction.first_queued(ids)
    return job


def awaited(transaction: Transaction, job: Job) -> bool:
    """True if the device that asked for the job still waits for it."""
    if not job.asked_by or job.asked_s is None or transaction.now_s >= job.asked_s + ASK_S:
        return False
    return idle(transaction, job.asked_by)


def idle(transaction: Transaction, name: str) -> bool:
    """True if that device is known and has no job."""
    return any(device.name == name and device.busy_until_s is None for device in transaction.devices())
