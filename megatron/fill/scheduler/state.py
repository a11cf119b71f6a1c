"""The input of policies: waiting jobs, devices, device time of users.  Points in time are seconds since the epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median


@dataclass(frozen=True, slots=True)
class JobView:
    """A waiting job."""

    id: int  # number in the store
    name: str
    submitted_s: float  # time of submission
    user: str = ""  # user to whom fair sharing attributes it
    priority: int = 0  # greater is more urgent
    deadline_s: float | None = None  # time by which it should be done; None for no deadline
    remaining_work: float | None = None  # remaining work in the job's unit; None if unknown
    # Processing time in s of the remaining work, by device name; infinity if it fits no bubble there, None or missing
    # if unknown.
    processing_s: Mapping[str, float | None] = field(default_factory=dict)
    attempt: int = 0  # number of earlier claims

    def fits(self, device: DeviceState) -> bool:
        """True unless the job is known to fit no bubble of the device."""
        return self.processing_s.get(device.name) != inf


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device that serves jobs."""

    name: str
    busy_until_s: float | None = None  # expected end of its current job; None if it is idle, infinity if unknown


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The state of queue and devices for a policy."""

    now_s: float  # current time
    devices: tuple[DeviceState, ...]
    jobs: tuple[JobView, ...]
    used_s: Mapping[str, float] = field(default_factory=dict)  # device time in s by user, running jobs included

    def processing_s(self, job: JobView, device: DeviceState) -> float:
        """The processing time in s of the job on the device.

        For an unknown time, so that the job is neither favoured nor delayed, the median of the known, finite times of
        jobs on that device; without any, the median of the job's times on other devices, or else 0.
        """
        known = job.processing_s.get(device.name)
        if known is not None:
            return known
        there = _finite(other.processing_s.get(device.name) for other in self.jobs)
        return median(there or _finite(job.processing_s.values()) or [0.0])

    def done_s(self, job: JobView, device: DeviceState) -> float:
        """The time at which the job would be done if it were the device's next job."""
        free_s = self.now_s if device.busy_until_s is None else max(self.now_s, device.busy_until_s)
        return free_s + self.processing_s(job, device)


def _finite(times_s: Iterable[float | None]) -> list[float]:
    return [seconds for seconds in times_s if seconds is not None and seconds != inf]
