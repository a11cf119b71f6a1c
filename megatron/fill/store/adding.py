"""Adding new jobs, and checking that they may be added, in one transaction of the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.fill.errors import JobError
from megatron.fill.store.lookup import NAMES_COMPARED, closest
from megatron.fill.store.transaction import Transaction
from megatron.fill.store.values import Job
from megatron.fill.work import NewJob


def add(transaction: Transaction, new: Sequence[NewJob]) -> list[Job]:
    """Add the jobs that are not in the queue yet, all or none; return the job in the queue for each.

    Raises:
        JobError: a name is in use by another job, or a job is after a job that does not exist.
    """
    known = transaction.unfinished({job.name for job in new})
    fresh: dict[str, NewJob] = {}
    for job in new:
        namesake = known.get(job.name)
        if namesake is not None and namesake.work.identity() != job.work.identity():
            raise JobError(
                f"the name {job.name!r} is in use by the {namesake.state} job {namesake.id}, which is another one; "
                "expected another name, or that job cancelled first"
            )
        first = fresh.setdefault(job.name, job) if namesake is None else job
        if first is not job and first.work.identity() != job.work.identity():
            raise JobError(f"two different jobs are named {job.name!r}; expected different names")
    _check_after(transaction, fresh)
    known |= {job.name: job for job in transaction.add(list(fresh.values()))}
    return [known[job.name] for job in new]


def _check_after(transaction: Transaction, fresh: Mapping[str, NewJob]) -> None:
    """Check that every job that a new job is after exists, since it would otherwise wait forever.

    Raises:
        JobError: one does not exist.
    """
    firsts = {first for job in fresh.values() for first in job.work.after} - fresh.keys()
    missing = firsts - transaction.states(firsts).keys()
    for job in fresh.values():
        for first in job.work.after:
            if first in missing:
                close = closest(first, [*fresh, *transaction.names(NAMES_COMPARED)])
                raise JobError(f"job {job.name!r} is after {first!r}, but there is no job {first!r}{close}")
