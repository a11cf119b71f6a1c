"""Filters for the waiting jobs: those that may begin, and those that a tail seat may take."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.fill.store.port import DeviceEntry, Job, JobStore
from megatron.fill.types import JobState


def may_begin(store: JobStore, waiting: Sequence[Job]) -> Sequence[Job]:
    """Return the waiting jobs without those whose prerequisites (``after``) have not all succeeded."""
    firsts = {first for job in waiting for first in job.work.after}
    if not firsts:
        return waiting
    done = {name for name, state in store.states(firsts).items() if state is JobState.SUCCEEDED}
    return [job for job in waiting if done.issuperset(job.work.after)]


def for_tails(waiting: Sequence[Job], devices: Sequence[DeviceEntry]) -> list[Job]:
    """Return the jobs that are left when each idle device gets the first job that it does not refuse."""
    idle = [device for device in devices if device.busy_until_s is None]
    left = []
    for job in waiting:
        taker = next((device for device in idle if job.id not in device.refuses), None)
        if taker is None:
            left.append(job)
        else:
            idle.remove(taker)
    return left
