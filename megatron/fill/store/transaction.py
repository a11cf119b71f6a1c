"""What the rules of the queue ask of a database."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from megatron.fill.store.port import DeviceEntry, Job, NewJob
from megatron.fill.types import JobState


class Transaction(Protocol):
    """What the rules do to a database, all of it or nothing; a job once read stays locked until the end."""

    @property
    def now_s(self) -> float:
        """The time that leases are measured by."""

    def lock_names(self) -> None:
        """Let no other transaction submit jobs until this one ends."""

    def add(self, jobs: Sequence[NewJob]) -> list[Job]:
        """New QUEUED jobs, numbered in this order and above all earlier ones."""

    def put(self, job: Job) -> None:
        """Write what can change of a job."""

    def job(self, job_id: int) -> Job | None:
        """The job of that number; None if there is none."""

    def unfinished(self, names: Collection[str]) -> dict[str, Job]:
        """The unfinished jobs of these names, by name."""

    def latest(self, name: str) -> Job | None:
        """The last one submitted of that name."""

    def states(self, names: Collection[str]) -> dict[str, JobState]:
        """As ``JobStore.states``."""

    def first_queued(self, ids: Sequence[int]) -> Job | None:
        """The first of ``ids`` that is QUEUED and that no other transaction holds."""

    def expired(self) -> list[Job]:
        """The RUNNING jobs whose lease ran out, but for those that another transaction holds."""

    def jobs(self, states: Collection[JobState], limit: int | None) -> list[Job]:
        """As ``JobStore.list``."""

    def stamp(self) -> tuple[int, int, int]:
        """As ``JobStore.stamp``."""

    def names(self, limit: int) -> list[str]:
        """Of the latest ``limit`` jobs."""

    def put_device(self, device: DeviceEntry, lease_s: float) -> None:
        """As ``JobStore.report_device``."""

    def drop_device(self, name: str) -> None:
        """As ``JobStore.forget_device``."""

    def devices(self) -> list[DeviceEntry]:
        """As ``JobStore.devices``."""

    def profile(self, key: str) -> dict[str, Any] | None:
        """As ``JobStore.profile``."""

    def put_profile(self, key: str, profile: dict[str, Any]) -> None:
        """As ``JobStore.keep_profile``."""
