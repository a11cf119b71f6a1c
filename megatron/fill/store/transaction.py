"""The interface of a database transaction that the rules of the queue need."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from megatron.fill.store.values import DeviceEntry, Job
from megatron.fill.types import JobState
from megatron.fill.work import NewJob


class Transaction(Protocol):
    """An atomic transaction on a database; a job that was read to be changed stays locked until its end."""

    @property
    def now_s(self) -> float:
        """The current time, by the clock that leases use."""

    @property
    def repeats(self) -> bool:
        """True if the connection broke in an earlier try of this call, which may have been committed."""

    # Prevents other transactions from submitting and from counting jobs until this one ends; before any other lock.
    def lock_names(self) -> None: ...
    def add(self, jobs: Sequence[NewJob]) -> list[Job]: ...  # as QUEUED, numbered in this order and above all others
    def put(self, job: Job) -> None: ...  # writes the fields of a job that can change
    def drop(
        self, ids: Sequence[int], before_s: float
    ) -> list[int]: ...  # deletes those finished before; their numbers
    def job(self, job_id: int) -> Job | None: ...
    def unfinished(self, names: Collection[str]) -> dict[str, Job]: ...  # the unfinished jobs with these names, by name
    def latest(self, name: str) -> Job | None: ...  # the latest job with that name
    def first_queued(self, ids: Sequence[int]) -> Job | None: ...  # the first that no other transaction has locked
    def expired(self) -> list[Job]: ...  # the RUNNING jobs whose lease has expired, except those locked by another
    def names(self, limit: int) -> list[str]: ...  # the names of the latest jobs

    # As in ``JobStore``, where ``list`` gives jobs, and devices and profiles are reported, forgotten and kept.
    def states(self, names: Collection[str]) -> dict[str, JobState]: ...
    def jobs(self, states: Collection[JobState], limit: int | None) -> list[Job]: ...
    def stamp(self) -> tuple[int, int, int]: ...
    def used_s(self, since_s: float) -> dict[str, float]: ...
    def put_device(self, device: DeviceEntry, lease_s: float) -> None: ...
    def drop_device(self, name: str) -> None: ...
    def devices(self) -> list[DeviceEntry]: ...
    def profile(self, key: str) -> dict[str, Any] | None: ...
    def put_profile(self, key: str, profile: dict[str, Any]) -> None: ...
