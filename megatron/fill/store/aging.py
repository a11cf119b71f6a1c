"""The choice of the finished jobs that a store may forget."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron.fill.store.values import Job


def forgettable(jobs: Sequence[Job], before_s: float, ids: Collection[int]) -> list[Job]:
    """Return those of ``ids`` that finished before ``before_s`` and that no other job needs, ascending by number.

    A job stays if it is the latest of a name that a job which stays is ``after``: that one would wait forever.  The
    newest job of all stays, since a database may give its number again.

    Args:
        jobs: all jobs of the store, ascending by number.
        before_s: seconds since the epoch.
        ids: numbers of the jobs that may go.
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
