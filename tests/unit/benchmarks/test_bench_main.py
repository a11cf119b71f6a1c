"""The parts of the benchmarks that can be told without a training."""

import json
import sys

import numpy as np
import pytest

from megatron.fill.sidetask.base import TaskContext
from megatron.fill.types import Iteration
from scripts.benchmarks.bench_main import PARTS
from scripts.benchmarks.harness import Results
from scripts.benchmarks.sidetasks import Metered, tasks_of
from scripts.benchmarks.trainings import Blocks, p99_slowdown, startup_s

BLOCKS = Blocks(length=2, pairs=2, warmup=3)


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
