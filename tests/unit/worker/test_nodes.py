"""A node task's plan in its worker: chosen from the board's cycle, and changed between iterations when that pays."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.fill.errors import PlanError, StaleProfile
from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.pages.steplog import StepLog, create_log
from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, NodeProfile
from megatron.fill.sidetask.nodes import NodeTask
from megatron.fill.types import BubbleKind
from megatron.fill.work import Work
from megatron.fill.worker.nodes import NodeRun
from megatron.fill.worker.pacing import at_once
from tests.support.fakes import FakeGate, worker_spec

MS = 1_000_000
pytestmark = pytest.mark.usefixtures("own_pages")


def profile(batch: int, *nodes_ms: float, work: float | None = None) -> JobProfile:
    nodes = tuple(NodeProfile(f"forward {at}", int(ms * MS), 100) for at, ms in enumerate(nodes_ms))
    return JobProfile(Configuration(batch), nodes, work or float(batch))


class Task(NodeTask):
    split = "by script"

    def __init__(self) -> None:
        self.configured: list[int] = []

    def configure(self, configuration: Configuration) -> None:
        assert self.next_node == 0
        self.configured.append(configuration.batch_size)

    def node_names(self) -> tuple[str, ...]:
        return ("forward 0", "forward 1")

    def iteration_work(self) -> float:
        return 1.0


class Bench:
    def __init__(self, folder: Path, *profiles: JobProfile) -> None:
        self.board = CycleBoard()
        self.task = Task()
        self.stop = False
        self.loop = SimpleNamespace(
            hold_at_start=False,
            expect=lambda profile: self.expected.append(profile),
            gate=FakeGate(),
            log=StepLog(create_log()),
            stopping=lambda: self.stop,
            turn=at_once,
        )
        self.expected: list[JobProfile] = []
        spec = worker_spec(folder, Work("m:C"), profiles=profiles)
        reader = CycleBoardReader(self.board.reader_fd())
        self.run = NodeRun(spec, self.task, spec.profiles, self.loop, reader)  # type: ignore[arg-type]

    def show(self, bubble_ms: float) -> None:
        self.board.show(BubbleCycle(100 * MS, (BubbleSlot(BubbleKind.FILL, int(bubble_ms * MS), 10**6),)))

    def begin(self) -> None:
        assert self.run.choose()
        self.run.configure()
        self.run.begin()


SMALL, LARGE = profile(1, 4, 4), profile(4, 9, 9)


def test_the_best_configuration_that_fits_is_taken_and_written_down(tmp_path):
    bench = Bench(tmp_path, SMALL, LARGE)
    bench.show(20)
    bench.begin()
    assert bench.task.configured == [4]
    assert bench.expected == [LARGE]
    plan = ExecutionPlan.from_dict(json.loads((tmp_path / "plan.json").read_text()))
    assert plan.work_per_cycle == 4
    assert (tmp_path / "plan.txt").read_text() == f"{plan}\n"


def test_nothing_fits(tmp_path):
    bench = Bench(tmp_path, SMALL, LARGE)
    bench.show(2)
    with pytest.raises(PlanError, match="too long for bubble 0"):
        bench.run.choose()


def test_a_task_that_has_changed_is_noticed(tmp_path):
    bench = Bench(tmp_path, profile(1, 4))
    bench.show(20)
    with pytest.raises(StaleProfile, match="has 1 nodes and the task 2"):
        bench.begin()


def test_the_end_of_the_main_job_ends_the_wait_for_a_cycle(tmp_path):
    bench = Bench(tmp_path, SMALL)
    bench.stop = True
    assert not bench.run.choose()


def test_other_bubbles_change_the_configuration_between_iterations(tmp_path):
    bench = Bench(tmp_path, SMALL, LARGE)
    bench.show(8.5)
    bench.begin()
    assert bench.task.configured == [1]
    bench.show(9)  # no drift
    bench.run.follow()
    assert not bench.loop.hold_at_start
    bench.show(30)
    bench.task.next_node = 1
    bench.run.follow()
    assert bench.loop.hold_at_start  # no new iteration begins
    assert bench.task.configured == [1]
    bench.task.next_node = 0
    bench.run.follow()
    assert bench.task.configured == [1, 4]
    assert bench.expected == [SMALL, LARGE]
    assert not bench.loop.hold_at_start


def test_a_little_better_is_not_worth_the_change(tmp_path):
    bench = Bench(tmp_path, SMALL, profile(4, 17, 17, work=4.4))
    bench.show(17)
    bench.begin()
    assert bench.task.configured == [1]
    bench.show(40)  # four samples a cycle as it is, 4.4 in the other configuration
    bench.run.follow()
    assert not bench.loop.hold_at_start
    assert json.loads((tmp_path / "plan.json").read_text())["configuration"] == "b1"


def test_bubbles_that_fit_nothing_any_more_change_nothing(tmp_path):
    bench = Bench(tmp_path, SMALL)
    bench.show(20)
    bench.begin()
    bench.show(1)
    bench.run.follow()
    assert bench.task.configured == [1]
    assert not bench.loop.hold_at_start
