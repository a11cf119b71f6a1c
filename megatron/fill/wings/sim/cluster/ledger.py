"""The main jobs and groups of devices of a simulation, with what is known of them so far."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.profiles import BubbleCycle
from megatron.fill.wings.sim.cluster.fleet import FleetDevice
from megatron.fill.wings.sim.cluster.rates import Rates
from megatron.fill.wings.sim.values import DeviceGroup, GroupOutcome, MainJobRun, Scenario


@dataclass(slots=True)
class MainEntry:
    """A main job."""

    run: MainJobRun
    # Range of its devices' numbers; ``last`` is excluded.
    first: int
    last: int
    up: bool = False
    since_s: float | None = None  # time of the last start or stop; None before its first start and after its end
    token: int = 0  # number of starts and stops
    # Seconds up and down, of one device.
    up_s: float = 0.0
    down_s: float = 0.0

    def change(self, up: bool, since_s: float | None, now_s: float) -> None:
        """Account for the time until ``now_s``; ``since_s`` is None if the main job has ended."""
        if self.since_s is not None:
            if self.up:
                self.up_s += now_s - self.since_s
            else:
                self.down_s += now_s - self.since_s
        self.up, self.since_s = up, since_s
        self.token += 1


@dataclass(slots=True)
class GroupEntry:
    """The use of a group of devices, in device seconds."""

    group: DeviceGroup
    main: MainEntry
    resident_s: float = 0.0
    tail_s: float = 0.0
    alone_s: float = 0.0

    def outcome(self) -> GroupOutcome:
        group, main = self.group, self.main
        main_s = main.up_s * group.count
        return GroupOutcome(
            name=group.name,
            count=group.count,
            main_s=main_s,
            bubble_s=main_s * group.cycle.bubble_ns / group.cycle.period_ns,
            down_s=main.down_s * group.count,
            resident_s=self.resident_s,
            tail_s=self.tail_s,
            alone_s=self.alone_s,
        )


def inventory(scenario: Scenario) -> tuple[list[MainEntry], list[GroupEntry], list[FleetDevice]]:
    """Return the main jobs, groups and devices in the scenario's order.

    Devices with equal cycles share one ``Rates``.
    """
    mains: list[MainEntry] = []
    groups: list[GroupEntry] = []
    devices: list[FleetDevice] = []
    known: dict[BubbleCycle, Rates] = {}
    for run in scenario.main_jobs:
        first = len(devices)
        main = MainEntry(run, first, first + sum(group.count for group in run.groups))
        mains.append(main)
        for group in run.groups:
            if group.cycle not in known:
                known[group.cycle] = Rates(group.cycle, scenario.kinds, scenario.runtime)
            for one in range(group.count):
                devices.append(FleetDevice(len(devices), f"{group.name}/{one}", len(groups), known[group.cycle]))
            groups.append(GroupEntry(group, main))
    return mains, groups, devices
