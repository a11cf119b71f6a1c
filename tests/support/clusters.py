"""Small clusters for the tests of the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, NodeProfile
from megatron.fill.scheduler.policies import POLICIES, parse_policy
from megatron.fill.scheduler.state import DeviceState, JobView, SchedulerState
from megatron.fill.types import BubbleKind
from megatron.fill.wings.sim.cluster import simulate
from megatron.fill.wings.sim.cluster.fleet import Seats
from megatron.fill.wings.sim.cluster.queue import RankedQueue
from megatron.fill.wings.sim.cluster.rates import Rates
from megatron.fill.wings.sim.cluster.sight import FullSight
from megatron.fill.wings.sim.values import (
    DeviceGroup,
    Failures,
    FillKind,
    MainJobRun,
    RuntimeModel,
    Scenario,
    SimJob,
    SimOutcome,
)

MS = 1_000_000


def cycle(*bubbles: tuple[int, int], period_ms: int = 1000) -> BubbleCycle:
    """Bubbles as (milliseconds, bytes free)."""
    return BubbleCycle(period_ms * MS, tuple(BubbleSlot(BubbleKind.FILL, ms * MS, free) for ms, free in bubbles))


def profile(nodes: int, node_ms: int, memory: int, batch: int = 1) -> JobProfile:
    """An iteration does as much work as the batch is large."""
    found = tuple(NodeProfile(f"node {n}", node_ms * MS, memory) for n in range(nodes))
    return JobProfile(Configuration(batch), found, float(batch))


def kind(name: str, *profiles: JobProfile) -> FillKind:
    rate = max(one.work / one.duration_ns * 1e9 for one in profiles)
    return FillKind(name, "samples", profiles, rate)


def elsewhere_less_busy(job: JobView, state: SchedulerState, device: DeviceState) -> tuple[float, ...]:
    """A policy of a user's own that looks at everything."""
    busy = [its.busy_until_s or 0.0 for its in state.devices if its.name != device.name]
    return (sum(busy) % 7, state.done_s(job, device), -float(len(state.jobs)), state.used_s.get(job.user, 0.0))


OWN = f"{__name__}:elsewhere_less_busy"
any_policy = st.sampled_from([*POLICIES, "0.7*sjf+0.3*deadline", "makespan+fair+2*fifo", OWN])

bubbles = st.tuples(st.sampled_from([20, 61, 100, 5]), st.sampled_from([16, 20, 10, 4]))
cycles = st.lists(bubbles, min_size=1, max_size=3)
profiles = st.builds(
    profile, st.integers(1, 3), st.sampled_from([3, 7, 15, 50]), st.sampled_from([4, 1, 9, 12]), st.integers(1, 2)
)


def unique_configurations(found: list[JobProfile]) -> tuple[JobProfile, ...]:
    return tuple({one.configuration: one for one in found}.values())


LARGE, SMALL = kind("large", profile(1, 50, 4)), kind("small", profile(2, 3, 2), profile(1, 7, 3, batch=2))
ASKING = replace(kind("asking", profile(1, 3, 2), profile(1, 7, 6, batch=4)), memory_bytes=5)
drawn_kinds = st.lists(st.lists(profiles, min_size=1, max_size=2).map(unique_configurations), max_size=3).map(
    lambda found: tuple(kind(f"kind-{n}", *its) for n, its in enumerate(found))
)
kinds = drawn_kinds.map(lambda found: (SMALL, LARGE, ASKING, *found))


@st.composite
def main_jobs(draw: st.DrawFn, most_devices: int) -> tuple[MainJobRun, ...]:
    distinct = [cycle(*its) for its in draw(st.lists(cycles, min_size=1, max_size=3))]
    runs = []
    for number in range(draw(st.sampled_from([1, 1, 2]))):
        groups = tuple(
            DeviceGroup(
                f"main-{number}/stage {stage}", draw(st.integers(1, most_devices)), draw(st.sampled_from(distinct))
            )
            for stage in range(draw(st.integers(1, 2)))
        )
        start_s = float(draw(st.sampled_from([0, 0, 30])))
        end_s = draw(st.sampled_from([float("inf"), 100.0, 400.0]))
        runs.append(MainJobRun(f"main-{number}", groups, start_s, end_s))
    return tuple(runs)


firsts: st.SearchStrategy[list[int]] = st.just([]) | st.lists(st.integers(0, 18), max_size=2)  # numbers of jobs


@st.composite
def scenarios(draw: st.DrawFn, policies: st.SearchStrategy[str], most_devices: int = 2) -> Scenario:
    found = draw(kinds)
    jobs = tuple(
        SimJob(
            id=(7 * number) % 31,
            name=f"job-{number}",
            kind=draw(st.sampled_from(found)).name,
            arrival_s=float(draw(st.sampled_from([0, 0, 5, 5, 20, 60]))),
            work=float(draw(st.sampled_from([100, 10, 1000, 50, 200, 1]))),
            deadline_s=draw(st.none() | st.integers(0, 500).map(float)),
            user=draw(st.sampled_from(["ada", "bob", ""])),
            priority=draw(st.integers(0, 2)),
            after=tuple({(7 * first) % 31 for first in draw(firsts) if first < number}),
        )
        for number in range(draw(st.integers(1, 20)))
    )
    runtime = RuntimeModel(
        reserve_ns=draw(st.sampled_from([0, 300_000])),
        margin_bytes=draw(st.sampled_from([0, 0, 1])),
        harvest=draw(st.sampled_from([1.0, 0.9])),
        start_s=draw(st.sampled_from([0.0, 0.5, 3.0])),
        checkpoint_s=draw(st.sampled_from([4.0, 60.0, float("inf")])),
        tail=draw(st.sampled_from([True, True, False])),
    )
    failures = Failures(
        mtbf_s=draw(st.sampled_from([float("inf"), 300.0, 2000.0])),
        restart_s=draw(st.sampled_from([0.0, 20.0])),
        seed=draw(st.integers(0, 3)),
    )
    policy = draw(policies)
    return Scenario(
        draw(main_jobs(most_devices)), found, jobs, draw(st.sampled_from([600.0, 50.0])), policy, runtime, failures
    )


class ScannedSeats(Seats):
    """Seats that are searched one by one."""

    def free(self, device, offer) -> None:
        self.offers[device] = offer

    def lowest(self, kinds: Iterable[str]) -> int | None:
        wanted = set(kinds)
        found = (index for index, offer in enumerate(self.offers) if offer is not None and wanted & offer.fits.keys())
        return next(found, None)


class EachByItself(simulate.Cluster):
    """A cluster that looks at each device by itself, and ranks all jobs that it may take, each time again."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        for device in self.devices:
            device.rates = Rates(self.groups[device.group].group.cycle, scenario.kinds, scenario.runtime)
        self.sight = FullSight(self.usage, self.devices)
        self.queue = RankedQueue(parse_policy(scenario.policy), self.sight)
        self.resident_seats, self.tail_seats = ScannedSeats(len(self.devices)), ScannedSeats(len(self.devices))


def simulate_each(scenario: Scenario) -> SimOutcome:
    """The outcome by ``EachByItself``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate, "Cluster", EachByItself)
        return simulate.simulate(scenario)
