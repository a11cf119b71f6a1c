"""The quota of each user: which waiting jobs may begin, and what the others are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron.fill.status import Cause, JobState, Status
from megatron.fill.store.port import Job
from megatron.fill.store.queue import JobStore
from megatron.fill.types import Quota

_HOUR_S, _DAY_S = 3600.0, 86400.0
_MOST_TOLD = 500  # waiting jobs, the first submitted, in which the store has why they wait


def within_quota(store: JobStore, waiting: Sequence[Job], quota: Quota) -> list[Job]:
    """Return the waiting jobs of users who have not used up their quota; the others have it as their cause.

    Jobs that run go on.  Two agents that ask at once may both find room for a job: ``JobStore.claim`` keeps the number
    of jobs.
    """
    reasons = _used_up(store, quota)
    for job in waiting[:_MOST_TOLD]:
        reason = reasons.get(job.user, "")
        if reason and (job.status.cause, job.status.detail) != (Cause.QUOTA, reason):
            store.note(job.id, Status(JobState.QUEUED, Cause.QUOTA, reason))
        elif not reason and job.status.cause is Cause.QUOTA:
            store.note(job.id, Status(JobState.QUEUED))
    return [job for job in waiting if job.user not in reasons]


def _used_up(store: JobStore, quota: Quota) -> dict[str, str]:
    """Return why each user who has used up the quota has."""
    reasons: dict[str, str] = {}
    if quota.device_hours is not None:
        used_s = store.used_s(store.now_s() - quota.days * _DAY_S)
        most = f"{quota.device_hours:g} device-hours in {quota.days:g} days"
        reasons |= {user: f"has had {most}" for user, its in used_s.items() if its >= quota.device_hours * _HOUR_S}
    if quota.jobs is not None:
        running = Counter(job.user for job in store.list({JobState.RUNNING}))
        most = f"{quota.jobs} job{'' if quota.jobs == 1 else 's'}"
        reasons |= {user: f"runs {most}" for user, count in running.items() if count >= quota.jobs}
    return reasons
