"""The parts of the benchmarks that can be told without a training."""

import json
import sys
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.fill.pages.gate import OpenBubble, SharedGate, SharedGateReader
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.types import BubbleKind, Iteration
from scripts.benchmarks import beside
from scripts.benchmarks.bench_main import PARTS
from scripts.benchmarks.harness import Results
from scripts.benchmarks.sidetasks import Metered, tasks_of
from scripts.benchmarks.trainings import Blocks, p99_slowdown, startup_s

BLOCKS = Blocks(length=2, pairs=2, warmup=3)
MS = 1_000_000


def iterations(*seconds: float) -> list[Iteration]:
    ends = np.cumsum(seconds)
    return BLOCKS.mark(
        Iteration(number, int((end - its) * 1e9), int(end * 1e9))
        for number, (its, end) in enumerate(zip(seconds, ends, strict=True), start=1)
    )


def test_blocks_follow_the_warm_up_and_each_kind_comes_first_in_turn():
    assert BLOCKS.iterations == 11
    assert [BLOCKS.block_of(number) for number in range(1, 12)] == [-1, -1, -1, 0, 0, 1, 1, 2, 2, 3, 3]
    assert [number for number in range(1, 12) if BLOCKS.fills(number)] == [4, 5, 10, 11]
    assert [(one.block, one.filling) for one in iterations(1, 1, 1, 1)] == [(-1, False)] * 3 + [(0, True)]


def test_the_slowest_iterations_with_filling_count_against_the_slowest_without():
    assert p99_slowdown(iterations(9, 9, 9, 1, 2, 1, 1)) == pytest.approx(0.99)


def test_the_start_of_jobs_is_what_the_warm_up_takes_beyond_usual_iterations_on_a_slower_machine_too():
    with_jobs = iterations(6, 3, 2, 2, 2, 2, 2)
    without = iterations(2, 1, 1, 1, 1, 1, 1)
    assert startup_s(with_jobs, without) == pytest.approx((4 + 1) - 1)


@pytest.mark.parametrize(("step_ms", "reserved_ms"), [(0.1, 12), (2.1, 12), (10, 12), (10.1, 24), (50, 60)])
def test_freeride_reserves_a_steps_time_rounded_up_to_10_ms_and_times_1_2(step_ms, reserved_ms):
    assert beside.reserved_ns(step_ms * MS) == reserved_ms * MS


class Over(Exception):
    pass


def drive_freeride(monkeypatch: pytest.MonkeyPatch, end_ms: float, step_ms: float, until_ms: float) -> list[float]:
    """When steps begin, in ms, of a task that is told at 0 that a bubble ends then; it is paused 10 ms later."""
    now_ns = 0
    begun: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now_ns
        now_ns += round(seconds * 1e9)
        if now_ns > until_ms * MS:
            raise Over

    def step() -> None:
        begun.append(now_ns / MS)
        sleep(step_ms / 1e3)

    bubble = OpenBubble(1, 0, int(end_ms * MS), 0)
    gate = SimpleNamespace(current=lambda: bubble if now_ns < (end_ms + 10) * MS else None)
    monkeypatch.setattr(beside, "time", SimpleNamespace(sleep=sleep, monotonic_ns=lambda: now_ns))
    with pytest.raises(Over):
        beside.step_as_freeride(step, gate, beside.reserved_ns(step_ms * MS))  # type: ignore[arg-type]
    return begun


def test_freeride_steps_while_the_reserved_time_is_left_and_sleeps_5_ms_between(monkeypatch):
    assert drive_freeride(monkeypatch, end_ms=40, step_ms=2, until_ms=100) == [0, 7, 14, 21]  # 28 + 12 is too late
    assert drive_freeride(monkeypatch, end_ms=12, step_ms=2, until_ms=100) == []


def test_freerides_manager_starts_the_task_with_the_bubbles_end_and_pauses_it_then(monkeypatch):
    told, running = SharedGate(), SharedGate()
    seen = SharedGateReader(running.reader_fd())
    ticks = count()
    now_ns = 100 * MS
    states: list[int | None] = []

    def sleep(seconds: float) -> None:
        nonlocal now_ns
        bubble = seen.current()
        states.append(None if bubble is None else bubble.deadline_ns // MS)
        now_ns += round(seconds * 1e9)
        if next(ticks) == 0:
            told.open(125 * MS, 0)
        if len(states) == 6:
            raise Over

    monkeypatch.setattr(beside, "time", SimpleNamespace(sleep=sleep, monotonic_ns=lambda: now_ns))
    monkeypatch.setattr(beside.host, "yield_to_main_job", lambda cores: None)
    with pytest.raises(Over):
        beside.manage(SharedGateReader(told.reader_fd()), running, 0)
    assert states == [None, 125, 125, None, None, None]  # at 100, 110, ... ms


def test_bubbles_are_announced_with_their_shortest_length_of_the_last_iterations_of_the_warm_up(monkeypatch):
    monkeypatch.setattr(beside.RankListener, "__init__", lambda self: None)
    for name in ("iteration_started", "bubble_opened", "bubble_closed"):
        monkeypatch.setattr(beside.RankListener, name, lambda *_: None)
    told = SharedGate()
    gate = SharedGateReader(told.reader_fd())
    rank = beside.Telling(told, beside.Way("completion", beside.When.FREERIDE), Blocks(1, 1, 7))
    for iteration, length in enumerate([1, 1, 90, 80, 70, 85, 99], start=1):
        rank.iteration_started(iteration, 0)
        rank.bubble_opened(BubbleKind.FILL, 0, 1000)
        assert gate.current() is None
        rank.bubble_closed(1000 + length)
    rank.iteration_started(8, 0)
    rank.bubble_opened(BubbleKind.DRAIN, 1, 2000)
    assert gate.current() is None
    rank.bubble_opened(BubbleKind.FILL, 0, 2000)
    bubble = gate.current()
    assert bubble is not None
    assert bubble.deadline_ns == 2070


def test_the_time_of_steps_counts_inside_of_the_bubble_and_their_device_time_in_proportion():
    steps = np.array([[0, 10, 5], [10, 20, 10], [40, 60, 20]])
    assert beside.inside_ns(steps, 5, 50).tolist() == [5 + 10 + 10, 2.5 + 10 + 10]


def test_a_metered_task_reports_the_cpu_time_of_its_steps(tmp_path):
    task = Metered()
    task.context = TaskContext("job", tmp_path)
    path, args = tasks_of(3.0)[0]
    task.create(path, args)
    task.init()
    task.run_next_step()
    task.stop()
    assert task.context.result["device_s"] >= 0.003


def test_results_of_several_calls_are_in_one_file(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    monkeypatch.setattr(sys, "argv", ["/x/bench_main.py", "--parts", "a"])
    Results(path).add("a", {"slowdown": 0.1}, "emulated", total={"steps": 1})
    Results(path).add("b", {"slowdown": 0.2}, "emulated", "baselines", "no_gate")
    Results(path).add("a", {"slowdown": 0.3}, "emulated")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["summary"] == {"emulated": {"slowdown": 0.3, "baselines": {"no_gate": {"slowdown": 0.2}}}}
    assert found["commands"]["b"] == "python scripts/benchmarks/bench_main.py --parts a"
    assert found["details"] == {"a": {"total": {"steps": 1}}}
    path.write_text('{"summary": {}}', encoding="utf-8")
    with pytest.raises(ValueError, match="something else"):
        Results(path)


def test_no_two_parts_have_their_figures_in_the_same_place_but_those_of_the_cpu():
    places = [where for where, _ in PARTS.values() if where]
    assert len(set(places)) == len(places) == len(PARTS) - 2
