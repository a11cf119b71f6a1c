"""What a policy sees: jobs that wait, devices, what users had so far.  Points in time are seconds since the epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median


@dataclass(frozen=True, slots=True)
class JobView:
    """A job that waits.

    Attributes:
        id: its number in the store.
        remaining_work: in its unit; None if it did not say how much there is.
        processing_s: per device name, the seconds that the remaining work takes there (``estimate_s``); infinite if it
            fits no bubble there, None or missing if that is not known.
        attempt: how many times it was claimed before.
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

    def __post_init__(self) -> None:
        for device, seconds in self.processing_s.items():
            if seconds is not None and not seconds >= 0:
                raise ValueError(f"job {self.id}: {seconds} s on {device}; expected None or at least 0")

    def fits(self, device: DeviceState) -> bool:
        """Whether it is not known that it fits no bubble there."""
        return self.processing_s.get(device.name) != inf


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device that serves jobs.

    Attributes:
        busy_until_s: when its present job is expected to be done; None when it is idle, infinity when nobody knows.
    """

    name: str
    busy_until_s: float | None = None


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Everything that a policy may weigh.

    Attributes:
        jobs: that wait.
        used_s: device seconds per user, of jobs that run now too.
    """

    now_s: float
    devices: tuple[DeviceState, ...]
    jobs: tuple[JobView, ...]
    used_s: Mapping[str, float] = field(default_factory=dict)

    def processing_s(self, job: JobView, device: DeviceState) -> float:
        """How long the job takes there.

        An unknown time is taken for the median of the known, finite ones on that device: a job is neither favoured nor
        put off for what nobody knows.  Of a device of which nothing is known, the job's own times elsewhere tell; where
        nothing is known at all, 0.
        """
        known = job.processing_s.get(device.name)
        if known is not None:
            return known
        there = _finite(other.processing_s.get(device.name) for other in self.jobs)
        return median(there or _finite(job.processing_s.values()) or [0.0])

    def done_s(self, job: JobView, device: DeviceState) -> float:
        """When the job would be done if it were that device's next one."""
        free_s = self.now_s if device.busy_until_s is None else max(self.now_s, device.busy_until_s)
        return free_s + self.processing_s(job, device)


def _finite(times_s: Iterable[float | None]) -> list[float]:
    return [seconds for seconds in times_s if seconds is not None and seconds != inf]
