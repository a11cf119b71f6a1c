"""The in-memory twin of the SQL store, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from megatron.fill.status import JobState, Status
from megatron.fill.store.queue import JobStore
from megatron.fill.store.transaction import Transaction
from megatron.fill.store.values import DeviceEntry, Job, Progress
from megatron.fill.work import NewJob


class MemoryStore(JobStore):
    """A job store that exists as long as this object, for the threads of one process.

    Args:
        clock: clock in seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._lock = threading.Lock()
        self._tables = _Tables(clock)

    def _run[T](self, work: Callable[[Transaction], T], *, write: bool = True) -> T:
        with self._lock:
            before = self._tables.copy() if write else None
            try:
                return work(self._tables)
            except BaseException:
                if before is not None:
                    self._tables = before
                raise

    def close(self) -> None:
        """Do nothing: the store holds no resources."""


class _Tables:
    """The tables, as a ``Transaction``.  Values are never changed in place, so a copy of the tables is a snapshot."""

    repeats = False

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._jobs: dict[int, Job] = {}
        self._devices: dict[str, tuple[DeviceEntry, float]] = {}
        self._profiles: dict[str, dict[str, Any]] = {}

    def copy(self) -> _Tables:
        tables = _Tables(self._clock)
        tables._jobs = dict(self._jobs)
        tables._devices = dict(self._devices)
        tables._profiles = dict(self._profiles)
        return tables

    @property
    def now_s(self) -> float:
        return self._clock()

    def lock_names(self) -> None:
        """Do nothing: there is only one transaction at a time."""

    def add(self, jobs: Sequence[NewJob]) -> list[Job]:
        added = [self._new(job_id, job) for job_id, job in enumerate(jobs, max(self._jobs, default=0) + 1)]
        for job in added:
            self.put(job)
        return added

    def _new(self, job_id: int, job: NewJob) -> Job:
        return Job(
            id=job_id,
            name=job.name,
            work=job.work,
            user=job.user,
            priority=job.priority,
            deadline_s=job.deadline_s,
            status=Status(JobState.QUEUED),
            submitted_s=self.now_s,
            started_s=None,
            finished_s=None,
            attempt=0,
            owner=None,
            lease_until_s=None,
            cancelling=False,
            device="",
            directory="",
            progress=Progress(),
        )

    def put(self, job: Job) -> None:
        self._jobs[job.id] = job

    def drop(self, ids: Sequence[int], before_s: float) -> list[int]:
        dropped = []
        for job_id in ids:
            job = self._jobs[job_id]
            if job.finished_s is not None and job.finished_s < before_s:
                del self._jobs[job_id]
                dropped.append(job_id)
        return dropped

    def job(self, job_id: int) -> Job | None:
        return self._jobs.get(job_id)

    def unfinished(self, names: Collection[str]) -> dict[str, Job]:
        return {job.name: job for job in self._jobs.values() if job.name in names and not job.state.finished}

    def latest(self, name: str) -> Job | None:
        found = [job for job in self._jobs.values() if job.name == name]
        return found[-1] if found else None

    def states(self, names: Collection[str]) -> dict[str, JobState]:
        return {job.name: job.state for job in self._jobs.values() if job.name in names}

    def first_queued(self, ids: Sequence[int]) -> Job | None:
        jobs = (self._jobs.get(job_id) for job_id in ids)
        return next((job for job in jobs if job is not None and job.state is JobState.QUEUED), None)

    def expired(self) -> list[Job]:
        now_s = self.now_s
        return [job for job in self._jobs.values() if job.lost(now_s)]

    def jobs(self, states: Collection[JobState], limit: int | None) -> list[Job]:
        found = [job for job in self._jobs.values() if not states or job.state in states]
        return found if limit is None else found[max(0, len(found) - limit) :]

    def stamp(self) -> tuple[int, int, int]:
        queued = [job.id for job in self.jobs({JobState.QUEUED}, None)]
        return len(queued), sum(queued), len(self.jobs({JobState.SUCCEEDED}, None))

    def used_s(self, since_s: float) -> dict[str, float]:
        found: dict[str, float] = {}
        for job in self._jobs.values():
            if job.finished_s is None or job.finished_s >= since_s:
                found[job.user] = found.get(job.user, 0.0) + job.progress.harvested_s
        return found

    def names(self, limit: int) -> list[str]:
        return [job.name for job in self.jobs((), limit)]

    def put_device(self, device: DeviceEntry, lease_s: float) -> None:
        self._devices[device.name] = (device, self.now_s + lease_s)

    def drop_device(self, name: str) -> None:
        self._devices.pop(name, None)

    def devices(self) -> list[DeviceEntry]:
        now_s = self.now_s
        return [device for _, (device, until_s) in sorted(self._devices.items()) if until_s > now_s]

    def profile(self, key: str) -> dict[str, Any] | None:
        return self._profiles.get(key)

    def put_profile(self, key: str, profile: dict[str, Any]) -> None:
        self._profiles[key] = profile
