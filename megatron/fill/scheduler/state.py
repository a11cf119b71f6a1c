"""The input of policies: waiting jobs, devices, device time of users.  Points in time are seconds since the epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median


@dataclass(frozen=True, slots=True)
class JobView:
    """A waiting job.

    Attributes:
        id: number in the store.
        name: name of the job.
        submitted_s: time of submission.
        user: user to whom fair sharing attributes it.
        priority: greater is more urgent.
        deadline_s: time by which it should be done; None for no deadline.
        remaining_work: remaining work in the job's unit; None if unknown.
        processing_s: processing time in s of the remaining work, by device name (``unit_s``); infinity if it fits
            no bubble there, None or missing if unknown.
        attempt: number of earlier claims.
    """

    id: int
    name: str
    submitted_s: float
    user: str = ""
    priority: int = 0
    deadline_s: float | None = None
    remaining_work: float | None = None
    processing_s: Mapping[str, float | None] = field(default_factory=dict)
    attempt: int = 0

    def fits(self, device: DeviceState) -> bool:
        """True unless the job is known to fit no bubble of the device."""
        return self.processing_s.get(device.name) != inf


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device that serves jobs.

    Attributes:
        name: name of the device.
        busy_until_s: expected end of its current job; None if it is idle, infinity if unknown.
    """

    name: str
    busy_until_s: float | None = None


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The state of queue and devices for a policy.

    Attributes:
        now_s: current time.
        devices: devices that serve jobs.
        jobs: waiting jobs.
        used_s: device time in s by user, running jobs included.
    """

    now_s: float
    devices: tuple[DeviceState, ...]
    jobs: tuple[JobView, ...]
    used_s: Mapping[str, float] = field(default_factory=dict)

    def processing_s(self, job: JobView, device: DeviceState) -> float:
        """The processing time in s of the job on the device.

        An unknown time is replaced by the median of the known, finite times of jobs on that device, so that the job is
        neither favoured nor delayed.  If there are none, it is the median of the job's times on other devices; if
        there are none either, 0.
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
