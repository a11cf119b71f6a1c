"""An idle rank asks for a tail job of another rank: which one, when, and which it never asks for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.agent.mover import Mover
from megatron.fill.agent.ranking import Ranking
from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, NodeProfile
from megatron.fill.scheduler.policies import parse_policy
from megatron.fill.status import JobState, Status
from megatron.fill.store.values import Claim, DeviceEntry, Job, Progress, Standing
from megatron.fill.types import BubbleKind
from megatron.fill.work import NewJob, Work
from tests.support.fake_device import free_memory
from tests.support.memory_store import MemoryStore

MS = 1_000_000
WORK = Work("m:C")
pytestmark = pytest.mark.usefixtures("own_pages")


class Bench:
    """Rank 0 is idle, with bubbles of 20 in 100 ms; rank 1 runs ``resident`` and beside it ``tail``."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        self.now_s = 1000.0
        self.store = MemoryStore(lambda: self.now_s)
        board = CycleBoard()
        board.show(BubbleCycle(100 * MS, (BubbleSlot(BubbleKind.FILL, 20 * MS, 1 << 30),)))
        self.ranking = Ranking(
            parse_policy("priority"), "rank 0", "cpu", CycleBoardReader(board.reader_fd()), free_memory()
        )
        self.fitting = True
        self.mover = Mover("run", self.ranking, lambda job: self.fitting, *[lambda: self.now_s] * 2)
        self.claims: dict[str, Claim] = {}
        self.folder = folder
        for name in ("resident", "tail"):
            self.start(name, **spec)
        self.report(DeviceEntry("rank 0", "run"))
        self.report(DeviceEntry("rank 1", "run", math.inf, "resident"))

    def report(self, device: DeviceEntry) -> None:
        self.store.report_device(device, 1e6)

    def start(self, name: str, device: str = "rank 1", **spec: Any) -> Job:
        [job] = self.store.submit([NewJob(name, replace(WORK, **spec))])
        claim = self.store.claim(device, [job.id], 1e6, device)
        assert claim is not None
        assert self.store.place(claim, str(self.folder))
        self.claims[name] = claim
        return claim.job

    def go_on(self, seconds: float, harvest: float, name: str = "tail", **progress: Any) -> None:
        """Rank 1 tells every three seconds how far the job is; rank 0 looks every second."""
        values = {"resumable": True, "startup_s": 2.0} | progress
        for second in range(int(seconds)):
            self.now_s += 1
            if second % 3 == 0:
                before = self.store.get(self.claims[name].job.id).progress
                done = Progress(before.work_done + 3, harvested_s=before.harvested_s + 3 * harvest, **values)
                self.store.heartbeat(self.claims[name], done, 1e6)
            self.mover.look(self.store)

    def asked(self, name: str = "tail") -> bool:
        return self.store.get(self.claims[name].job.id).asked_by == "rank 0"


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(tmp_path)


def test_a_starved_tail_job_is_asked_for_after_a_while(bench):
    bench.go_on(9, 0.001)
    assert not bench.asked()
    bench.go_on(30, 0.001)
    assert bench.asked()
    assert not bench.asked("resident")
    assert bench.store.heartbeat(bench.claims["tail"], Progress(), 1e6) is Standing.MOVE


def test_one_that_gets_as_much_as_here_is_left_where_it_is(bench):
    bench.go_on(200, 0.13)
    assert not bench.asked()


@pytest.mark.parametrize(
    "progress",
    [
        {"resumable": False},
        {"startup_s": None},  # it does not serve yet
        {"startup_s": 500.0},
        {"total_work": 18.0},  # it is almost done by the time it is known
    ],
)
def test_one_that_would_lose_by_it_is_left_where_it_is(bench, progress):
    bench.go_on(60, 0.001, **progress)
    assert not bench.asked()


def test_commands_begin_again_so_they_are_never_moved(tmp_path):
    bench = Bench(tmp_path, task=None, command=("sleep", "1"))
    bench.go_on(60, 0.001)
    assert not bench.asked()


def test_one_without_its_folder_here_is_not_asked_for(tmp_path):
    bench = Bench(tmp_path / "on another node")
    bench.go_on(60, 0.001)
    assert not bench.asked()


def test_one_that_does_not_fit_here_is_not_asked_for(bench):
    bench.fitting = False
    bench.go_on(60, 0.001)
    assert not bench.asked()


def test_one_that_was_refused_here_is_not_asked_for(bench):
    bench.ranking.misfits.tried(bench.claims["tail"].job.id, tail=False)
    bench.go_on(60, 0.001)
    assert not bench.asked()


@pytest.mark.parametrize("resident", ["tail", ""])
def test_one_that_has_its_rank_to_itself_is_left_there(bench, resident):
    bench.report(DeviceEntry("rank 1", "run", math.inf, resident))
    bench.go_on(60, 0.001)
    assert not bench.asked()


def test_a_job_of_another_run_is_left_there(bench):
    bench.report(DeviceEntry("rank 1", "other run", math.inf, "resident"))
    bench.go_on(60, 0.001)
    assert not bench.asked()


@pytest.mark.parametrize(("node_ms", "asked"), [(10, True), (18, True), (19.9, False)])
def test_where_a_profile_is_known_it_tells_the_speed_here(bench, node_ms, asked):
    """One unit a second there, by its own count; ten of them here if a node fits a bubble at all."""
    node = NodeProfile("forward 0", int(node_ms * MS), 1 << 20)
    content = {"configurations": [JobProfile(Configuration(1), (node,), 1.0).to_dict()], "total_work": None}
    bench.store.keep_profile(bench.ranking.key(bench.claims["tail"].job), content)
    bench.go_on(60, 0.2)
    assert bench.asked() is asked


def test_of_two_the_one_that_gains_more_is_asked_for_and_the_other_stays(bench):
    bench.start("richer", "rank 2")
    bench.report(DeviceEntry("rank 2", "run", math.inf, "another"))
    for _ in range(10):
        bench.go_on(3, 0.001)
        bench.go_on(3, 0.1, "richer")
    assert bench.asked()
    assert not bench.asked("richer")


def test_a_job_is_not_asked_for_twice_in_a_while(bench):
    bench.go_on(60, 0.001)
    assert bench.store.release(bench.claims["tail"], Status(JobState.QUEUED, detail="moves"), Progress(), {})
    bench.now_s += 40  # rank 0 did not come for it
    claim = bench.store.claim("rank 1", [bench.claims["tail"].job.id], 1e6, "rank 1")
    assert claim is not None
    bench.claims["tail"] = claim
    bench.go_on(150, 0.001)
    assert not bench.asked()
    bench.go_on(150, 0.001)
    assert bench.asked()


def test_what_was_seen_before_this_rank_was_busy_is_forgotten(bench):
    bench.go_on(9, 0.001)
    bench.now_s += 60
    bench.go_on(9, 0.001)
    assert not bench.asked()
