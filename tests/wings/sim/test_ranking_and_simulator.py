"""The same jobs, devices and policy: a seat of the runtime and one of the simulator take them in the same order."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import pytest

from megatron.fill.agent.ranking import Ranking
from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, NodeProfile
from megatron.fill.scheduler.policies import POLICIES, parse_policy
from megatron.fill.status import Status
from megatron.fill.store.values import DeviceEntry, Progress
from megatron.fill.types import BubbleKind, JobState
from megatron.fill.wings.sim.cluster.fleet import FleetDevice
from megatron.fill.wings.sim.cluster.queue import RankedQueue, SteadyQueue
from megatron.fill.wings.sim.cluster.rates import Rates
from megatron.fill.wings.sim.cluster.sight import FullSight, Waiting
from megatron.fill.wings.sim.values import FillKind, RuntimeModel, SimJob
from megatron.fill.work import NewJob, Work
from tests.support.fake_device import free_memory
from tests.support.memory_store import MemoryStore

MS, MIB = 1_000_000, 1 << 20
USED_S = {"ada": 50.0, "bob": 0.0}  # before: by jobs that have ended
# name: ms of a node, work, user, priority, seconds to the deadline
JOBS: dict[str, tuple[float, float, str, int, float | None]] = {
    "middle": (3, 400, "ada", 0, None),
    "long": (3, 4000, "bob", 1, 50_000),
    "short": (3, 40, "ada", 0, 9_000),
    "coarse": (9, 300, "bob", 2, 300),  # its nodes fit the long bubbles only
    "late": (1, 90_000, "ada", 1, 10),
    "fine": (1, 500, "bob", 0, 20_000),
}
HERE_MS, OTHERS_MS = (20.0, 5.0), {"rank 1": (10.0, 5.0), "rank 2": (4.0,)}
POLICY_TEXTS = [
    *POLICIES,
    "0.7*sjf+0.3*deadline",
    "makespan+2*fair",
    "tests.wings.sim.test_ranking_and_simulator:least_left",
]


def least_left(job: Any, state: Any, device: Any) -> float:
    return -job.remaining_work


def cycle(*lengths_ms: float) -> BubbleCycle:
    slots = tuple(BubbleSlot(BubbleKind.FILL, int(length * MS), 100 * MIB) for length in lengths_ms)
    return BubbleCycle(100 * MS, slots)


def profile(node_ms: float) -> JobProfile:
    return JobProfile(Configuration(1), (NodeProfile("forward", int(node_ms * MS), 10 * MIB),), 1.0)


def work_of(name: str) -> Work:
    return Work(f"m:{name}")


def in_a_run(policy: str, busy_s: dict[str, float | None], now_s: float) -> list[str]:
    """The order in which an idle seat takes the jobs from a store."""
    board, store = CycleBoard(), MemoryStore()
    board.show(cycle(*HERE_MS))
    choice = Ranking(parse_policy(policy), "rank 0", "cpu", CycleBoardReader(board.reader_fd()), free_memory())
    for name, length_ms in OTHERS_MS.items():
        for_s = busy_s[name]
        until_s = None if for_s is None else now_s + for_s
        store.report_device(DeviceEntry(name, "run", until_s, cycle=asdict(cycle(*length_ms))), 3600)
    for user, used_s in USED_S.items():
        [ended] = store.submit([NewJob(f"before-{user}", work_of("before"), user)])
        claim = store.claim("x", [ended.id], 3600)
        assert claim is not None
        store.finish(claim, Status(JobState.SUCCEEDED), Progress(harvested_s=used_s), {})
    for name, (node_ms, work, user, priority, deadline_s) in JOBS.items():
        due_s = None if deadline_s is None else now_s + deadline_s
        [job] = store.submit([NewJob(name, work_of(name), user, priority, due_s)])
        store.keep_profile(choice.key(job), {"configurations": [profile(node_ms).to_dict()], "total_work": work})
    order = []
    while wanted := choice.wanted(store, None):
        job = store.get(wanted[0])
        order.append(job.name)
        store.cancel(job.id)
    return order


class Usage:
    def used_s(self, now_s: float) -> dict[str, float]:
        return USED_S


class Resident:
    def __init__(self, due_s: float) -> None:
        self.due_s = due_s


def simulated(policy_text: str, busy_s: dict[str, float | None], now_s: float, steady: bool) -> list[str]:
    """The same in the simulator."""
    policy = parse_policy(policy_text)
    kinds = [FillKind(name, "steps", (profile(node_ms),), 1.0) for name, (node_ms, *_) in JOBS.items()]
    runtime = RuntimeModel(margin_bytes=0)
    lengths = {"rank 0": HERE_MS, **OTHERS_MS}
    devices = [
        FleetDevice(at, name, at, Rates(cycle(*ms), kinds, runtime)) for at, (name, ms) in enumerate(lengths.items())
    ]
    for device in devices:
        device.up = True
        until_s = busy_s.get(device.name)
        device.resident = None if until_s is None else Resident(now_s + until_s)  # type: ignore[assignment]
    sight = FullSight(Usage(), devices)  # type: ignore[arg-type]
    waiting = SteadyQueue(policy) if steady else RankedQueue(policy, sight)
    for number, (name, (_, work, user, priority, deadline_s)) in enumerate(JOBS.items()):
        due_s = None if deadline_s is None else now_s + deadline_s
        waiting.add(Waiting(number, SimJob(number, name, name, 0.0, work, due_s, user, priority), work, 0))
    order = []
    while waiting.kinds:
        order.append(waiting.take(devices[0], devices[0].rates.whole, now_s).job.name)
    return order


@pytest.mark.parametrize("policy", POLICY_TEXTS)
@pytest.mark.parametrize("busy", [(None, None), (5.0, None), (30.0, 400.0), (1e6, float("inf"))], ids=str)
def test_a_run_and_the_simulator_take_jobs_in_one_order(policy, busy):
    now_s = time.time()
    busy_s = dict(zip(OTHERS_MS, busy, strict=True))
    order = in_a_run(policy, busy_s, now_s)
    assert sorted(order) == sorted(JOBS)
    assert order == simulated(policy, busy_s, now_s, steady=False)
    if parse_policy(policy).steady:
        assert order == simulated(policy, busy_s, now_s, steady=True)


def test_the_longest_leads_for_the_makespan():
    order = in_a_run("makespan", {"rank 1": None, "rank 2": None}, time.time())
    assert order == ["late", "long", "coarse", "middle", "fine", "short"]


def test_the_longest_leads_where_nothing_is_known_of_the_other_devices():
    board, store = CycleBoard(), MemoryStore()
    board.show(cycle(20))
    choice = Ranking(parse_policy("makespan"), "rank 0", "cpu", CycleBoardReader(board.reader_fd()), free_memory())
    store.report_device(DeviceEntry("rank 1", "run"), 3600)
    store.report_device(DeviceEntry("rank 2", "run", cycle={"slots": "of another version"}), 3600)
    for name, work in (("short", 10.0), ("long", 1000.0), ("middle", 100.0)):
        [job] = store.submit([NewJob(name, work_of(name))])
        store.keep_profile(choice.key(job), {"configurations": [profile(3).to_dict()], "total_work": work})
    assert [store.get(number).name for number in choice.wanted(store, None)] == ["long", "middle", "short"]
