"""The main jobs, groups and devices of a scenario, before anything happens."""

from __future__ import annotations

from megatron.fill.wings.sim.cluster.fleet import FleetDevice
from megatron.fill.wings.sim.cluster.ledger import GroupEntry, MainEntry
from megatron.fill.wings.sim.cluster.rates import Rates
from megatron.fill.wings.sim.values import Scenario


def inventory(scenario: Scenario) -> tuple[list[MainEntry], list[GroupEntry], list[FleetDevice]]:
    """Return the main jobs, groups and devices in the scenario's order.

    With ``symmetric`` all devices with equal cycles share one ``Rates``; otherwise each has its own.
    """
    mains: list[MainEntry] = []
    groups: list[GroupEntry] = []
    devices: list[FleetDevice] = []
    known: dict[object, Rates] = {}
    for number, run in enumerate(scenario.main_jobs):
        first = len(devices)
        main = MainEntry(run, first, first + sum(group.count for group in run.groups))
        mains.append(main)
        for group in run.groups:
            for one in range(group.count):
                key = group.cycle if scenario.symmetric else len(devices)
                if key not in known:
                    known[key] = Rates(group.cycle, scenario.kinds, scenario.runtime)
                devices.append(FleetDevice(len(devices), f"{group.name}/{one}", number, len(groups), known[key]))
            groups.append(GroupEntry(group, main))
    return mains, groups, devices
