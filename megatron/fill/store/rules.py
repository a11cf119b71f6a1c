"""The rules of the queue, each in one transaction: finding, adding and forgetting jobs, and whether they are free."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from megatron.fill.errors import JobError
from megatron.fill.store import checks
from megatron.fill.store.transaction import Transaction
from megatron.fill.store.values import Claim, Job
from megatron.fill.types import JobState
from megatron.fill.work import NewJob

ASK_S = 60.0  # time for which a job is reserved for the device that asked for it, since it has to be saved first
NAMES_COMPARED = 10_000


def find(transaction: Transaction, name: str) -> Job:
    """The latest job of that name, else the job of that number; JobError, with the closest names, if there is none."""
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
    """The job with that number; JobError if there is no such job."""
    job = transaction.job(job_id) if checks.possible(job_id) else None
    if job is None:
        raise JobError(f"there is no job {job_id}")
    return job


def held(transaction: Transaction, claim: Claim) -> Job | None:
    """The claimed job if the claim is still valid, else None."""
    job = transaction.job(claim.job.id)
    if job is None or (job.state, job.owner, job.attempt) != (JobState.RUNNING, claim.owner, claim.attempt):
        return None
    return job


def first_free(transaction: Transaction, ids: Sequence[int], device: str, full: Set[str] = frozenset()) -> Job | None:
    """The first QUEUED job of ``ids`` that is not reserved for another device, nor of a user in ``full``."""
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


def add(transaction: Transaction, new: Sequence[NewJob]) -> list[Job]:
    """Add the jobs that are not in the queue yet, all or none; return the job in the queue for each.

    Raises:
        JobError: a name is in use by another job, or a job is after a job that does not exist.
    """
    transaction.lock_names()
    known = transaction.unfinished({job.name for job in new})
    fresh: dict[str, NewJob] = {}
    for job in new:
        namesake = known.get(job.name)
        if namesake is not None and namesake.work.identity() != job.work.identity():
            use = f"in use by the {namesake.state} job {namesake.id}, which is another one"
            raise JobError(f"the name {job.name!r} is {use}; expected another name, or that job cancelled first")
        first = fresh.setdefault(job.name, job) if namesake is None else job
        if first is not job and first.work.identity() != job.work.identity():
            raise JobError(f"two different jobs are named {job.name!r}; expected different names")
    _check_after(transaction, fresh)
    known |= {job.name: job for job in transaction.add(list(fresh.values()))}
    return [known[job.name] for job in new]


def _check_after(transaction: Transaction, fresh: Mapping[str, NewJob]) -> None:
    """Check that every job that a new job is after exists, since it would otherwise wait forever."""
    firsts = {first for job in fresh.values() for first in job.work.after} - fresh.keys()
    missing = firsts - transaction.states(firsts).keys()
    for job in fresh.values():
        for first in job.work.after:
            if first in missing:
                close = closest(first, [*fresh, *transaction.names(NAMES_COMPARED)])
                raise JobError(f"job {job.name!r} is after {first!r}, but there is no job {first!r}{close}")


def forgettable(jobs: Sequence[Job], before_s: float, ids: Collection[int]) -> list[Job]:
    """Return those of ``ids`` that finished before ``before_s`` and that no other job needs, ascending by number.

    ``jobs`` are all jobs of the store, in that order.  A job stays if it is the latest of a name that a job which stays
    is ``after``: that one would wait forever.  The newest of all stays, since a database may give its number again.
    """
    latest = {job.name: job.id for job in jobs}
    going = {
        job.id: job for job in jobs[:-1] if job.id in ids and job.finished_s is not None and job.finished_s < before_s
    }
    queue = [job for job in jobs if job.id not in going]  # those that stay, each of which keeps its first jobs
    while queue:
        for name in queue.pop().work.after:
            first = going.pop(latest.get(name, 0), None)
            if first is not None:
                queue.append(first)
    return list(going.values())
