"""A policy's view of the cluster when a seat asks for a job.

Processing times on other devices assume their whole bubbles.  As in the runtime, the asking device counts as idle, and
devices whose main job is down are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from megatron.fill.scheduler.policies import Policy, makespan
from megatron.fill.scheduler.state import DeviceState, JobView, SchedulerState
from megatron.fill.wings.sim.cluster.fleet import FleetDevice
from megatron.fill.wings.sim.cluster.progress import Usage
from megatron.fill.wings.sim.cluster.rates import Offer, Rates
from megatron.fill.wings.sim.values import SimJob


@dataclass(frozen=True, slots=True)
class Waiting:
    """A waiting job."""

    index: int  # number of the job
    job: SimJob
    left: float  # remaining work
    attempts: int  # number of earlier claims

    @property
    def key(self) -> tuple[float, int]:
        """Sort key for the order of submission."""
        return (self.job.arrival_s, self.job.id)


def view(waiting: Waiting, processing_s: Mapping[str, float]) -> JobView:
    """Return the job as policies see it."""
    job = waiting.job
    return JobView(
        id=job.id,
        name=job.name,
        submitted_s=job.arrival_s,
        user=job.user,
        priority=job.priority,
        deadline_s=job.deadline_s,
        remaining_work=waiting.left,
        processing_s=processing_s,
        attempt=waiting.attempts,
    )


def _unit_s(offer: Offer, kind: str) -> float:
    fit = offer.fits.get(kind)
    return inf if fit is None else fit.unit_s


class Sight:
    """A view of only the asking device, for policies that do not look at others."""

    def __init__(self, usage: Usage) -> None:
        self.usage = usage

    def state(
        self, asking: FleetDevice, offer: Offer, jobs: Sequence[Waiting], now_s: float
    ) -> tuple[SchedulerState, DeviceState]:
        """Return the state for the policy, and the asking device."""
        here = DeviceState(asking.name)
        others = self._others(asking)
        times: dict[str, dict[str, float]] = {}  # seconds per unit of work, per kind and device
        views = []
        for waiting in jobs:
            kind = waiting.job.kind
            if kind not in times:
                times[kind] = {state.name: _unit_s(rates.whole, kind) for state, rates in others}
                times[kind][here.name] = _unit_s(offer, kind)
            left = waiting.left
            views.append(view(waiting, {name: unit_s * left for name, unit_s in times[kind].items()}))
        devices = (here, *(state for state, _ in others if state.name != here.name))
        return SchedulerState(now_s, devices, tuple(views), self.usage.used_s(now_s)), here

    def changed(self, device: FleetDevice) -> None:
        """Record that a device's resident job has changed, or that its main job has started or stopped."""

    def _others(self, asking: FleetDevice) -> list[tuple[DeviceState, Rates]]:
        """Return the devices to show in addition to the asking one, which may be among them."""
        return []


class FullSight(Sight):
    """A view of every device."""

    def __init__(self, usage: Usage, devices: Sequence[FleetDevice]) -> None:
        super().__init__(usage)
        self._devices = devices

    def _others(self, asking: FleetDevice) -> list[tuple[DeviceState, Rates]]:
        return [
            (DeviceState(device.name, None if device.resident is None else device.resident.due_s), device.rates)
            for device in self._devices
            if device.up
        ]


class NextSight(Sight):
    """A view of the device that is free first for each distinct cycle, besides the asking one.

    This suffices for ``makespan``, which takes a minimum over all other devices.
    """

    def __init__(self, usage: Usage, devices: Sequence[FleetDevice]) -> None:
        super().__init__(usage)
        self._devices = devices
        self._idle: dict[Rates, set[int]] = {device.rates: set() for device in devices}
        self._busy: dict[Rates, list[tuple[float, int]]] = {device.rates: [] for device in devices}
        self._until_s: list[float | None] = [None] * len(devices)  # time at which each busy device is free

    def changed(self, device: FleetDevice) -> None:
        index, idle = device.index, self._idle[device.rates]
        until_s = device.resident.due_s if device.up and device.resident is not None else None
        if device.up and until_s is None:
            idle.add(index)
        else:
            idle.discard(index)
        if until_s is not None and until_s != self._until_s[index]:
            heappush(self._busy[device.rates], (until_s, index))
        self._until_s[index] = until_s

    def _others(self, asking: FleetDevice) -> list[tuple[DeviceState, Rates]]:
        found = []
        for number, rates in enumerate(self._idle):
            if len(self._idle[rates]) > (asking.index in self._idle[rates]):
                found.append((DeviceState(f"class {number}"), rates))
            elif (until_s := self._first_busy(self._busy[rates], asking.index)) is not None:
                found.append((DeviceState(f"class {number}", until_s), rates))
        return found

    def _first_busy(self, heap: list[tuple[float, int]], asking: int) -> float | None:
        own: tuple[float, int] | None = None
        while heap:
            until_s, index = heap[0]
            if self._until_s[index] != until_s or heap[0] == own:
                heappop(heap)
            elif index == asking:
                own = heappop(heap)
            else:
                break
        first = heap[0][0] if heap else None
        if own is not None:
            heappush(heap, own)
        return first


def sight(policy: Policy, usage: Usage, devices: Sequence[FleetDevice]) -> Sight:
    """Return the smallest view that suffices for the policy."""
    if not policy.built_in:
        return FullSight(usage, devices)
    if any(function is makespan for _, _, function in policy.terms):
        return NextSight(usage, devices)
    return Sight(usage)
