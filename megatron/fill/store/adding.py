"""New jobs, and which may be there: in one transaction of the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.fill.errors import JobError
from megatron.fill.store.lookup import NAMES_COMPARED, closest
from megatron.fill.store.port import Job, NewJob
from megatron.fill.store.transaction import Transaction


def add(transaction: Transaction, new: Sequence[NewJob]) -> list[Job]:
    """Add those that are not there, all or none; for each, the job in the queue.

    Raises:
        JobError: a name is in use by another job, or a job is after one that there is not.
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
    """Raises JobError where a new job is after one that there is not: it would wait for ever."""
    firsts = {first for job in fresh.values() for first in job.work.after} - fresh.keys()
    missing = firsts - transaction.states(firsts).keys()
    for job in fresh.values():
        for first in job.work.after:
            if first in missing:
                close = closest(first, [*fresh, *transaction.names(NAMES_COMPARED)])
                raise JobError(f"job {job.name!r} is after {first!r}, but there is no job {first!r}{close}")
