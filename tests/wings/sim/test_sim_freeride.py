"""FreeRide's study: placement by its Algorithm 1, its reservations and polling, and where bubble time goes."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.pipeline.timeline import Wait
from megatron.fill.types import BubbleKind, BubbleUse
from scripts.benchmarks import sim_freeride
from scripts.benchmarks.studies.freeride.artifact import MIX_WORK, SIZES, TASKS
from scripts.benchmarks.studies.freeride.draw import draw_study
from scripts.benchmarks.studies.freeride.placement import fits, needed_gib, place, served
from scripts.benchmarks.studies.freeride.reserving import COMPILED, PYTHON, fill_reserved, reserved_ns
from scripts.benchmarks.studies.freeride.study import main_job, saving
from scripts.benchmarks.studies.freeride.training import BubbleTime, Rule, SimulatedTraining, Varying, split
from scripts.benchmarks.studies.truth.replay import PlayedIteration
from scripts.benchmarks.studies.truth.steps import StepTimes

MS = 1_000_000
RECORDED = Path(__file__).parents[3] / "docs" / "benchmarks" / "freeride-studies.json"


def iteration(*bubbles_ms: tuple[float, float], start_ms: float = 0) -> PlayedIteration:
    waits = [Wait(BubbleKind.INTERIOR, int(start * MS), int(end * MS)) for start, end in bubbles_ms]
    return PlayedIteration(1, int(start_ms * MS), waits)


# Placement.


@pytest.mark.parametrize(
    ("size", "expected"),
    [("1.2B", [0, 1, 2, 3]), ("3.6B", [0, 1, 2, 3]), ("6B", [1, 2, 3, 3])],
)
def test_the_mixed_workload_is_placed_as_by_freerides_scheduler(size, expected):
    needs = [needed_gib(TASKS[name].steps[TASKS[name].batch].memory_bytes) for name in MIX_WORK]
    assert needs == [2, 4, 11, 12]
    assert place(needs, SIZES[size].free_gib) == expected


def test_a_worker_needs_more_memory_than_the_task_asks_for():
    assert needed_gib(3 * 2**30) == 3
    assert needed_gib(3 * 2**30 + 1) == 4
    assert not fits(3, 3)
    assert place([3, 3, 9], [3, 4]) == [1, 1, None]


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9), min_size=1))
def test_every_task_goes_to_one_of_the_least_loaded_workers_with_enough_memory(needs, free):
    tasks: Counter[int] = Counter()
    for need, worker in zip(needs, place(needs, free), strict=True):
        able = [one for one, its in enumerate(free) if fits(need, its)]
        if worker is None:
            assert not able
            continue
        assert worker in able
        assert tasks[worker] == min(tasks[one] for one in able)
        tasks[worker] += 1


def test_a_worker_runs_the_first_task_that_it_was_given():
    assert served([1, 2, 3, 3], 4) == [None, 0, 1, 2]
    assert served([None, 0], 2) == [1, None]


# Reservation and polling.


@pytest.mark.parametrize(
    ("name", "expected_ms"),
    [("ResNet18", 48), ("ResNet50", 108), ("VGG19", 216), ("Graph SGD", 180), ("PageRank", 12), ("Image", 60)],
)
def test_a_step_reserves_its_median_rounded_up_to_10_ms_times_1_2(name, expected_ms):
    task = TASKS[name]
    assert reserved_ns(task.steps[task.batch].median_ns) == expected_ms * MS
    assert reserved_ns(10 * MS) == 12 * MS
    assert reserved_ns(10 * MS + 1) == 24 * MS


def test_polling_takes_as_long_as_the_periods_say():
    random = np.random.default_rng(0)
    python, compiled = PYTHON.wakes_ns(random, 5000), COMPILED.wakes_ns(random, 5000)
    assert 0 <= min(python) < MS
    assert 14 * MS < max(python) < 15 * MS
    assert sum(python) / 5000 == pytest.approx(7.5 * MS, rel=0.02)
    assert 10 * MS <= min(compiled) < 11.5 * MS
    assert sum(compiled) / 5000 == pytest.approx(20 * MS, rel=0.02)


@given(
    length_ms=st.integers(1, 400),
    step_ms=st.integers(1, 50),
    sleep_ms=st.integers(0, 10),
    wake_ms=st.integers(0, 20),
    reserve_ms=st.integers(1, 60),
)
def test_steps_begin_while_more_is_left_than_is_reserved(length_ms, step_ms, sleep_ms, wake_ms, reserve_ms):
    times = StepTimes((step_ms * MS,), (wake_ms * MS,), sleep_ms * MS, work=2.0)
    rows = [iteration((0, length_ms), start_ms=1000 * at) for at in range(3)]
    done = fill_reserved(rows, [length_ms * MS], times, reserve_ms * MS)
    room_ms = length_ms - wake_ms - reserve_ms
    steps = max(0, -(-room_ms // (step_ms + sleep_ms)))  # the last one begins before the room has gone
    assert [use.steps for use in done.uses] == [steps] * 3 * (steps > 0)
    assert done.work_done == 2.0 * 3 * steps
    for use in done.uses:
        last_ms = wake_ms + steps * step_ms + (steps - 1) * sleep_ms
        assert use.overrun_ns == max(0, last_ms - length_ms) * MS
        assert use.harvested_ns + use.overrun_ns == steps * step_ms * MS
        assert use.latency_ns == wake_ms * MS


def test_a_bubble_that_ends_before_its_profiled_end_is_overrun():
    done = fill_reserved([iteration((0, 20))], [50 * MS], StepTimes((30 * MS,)), 30 * MS)
    (use,) = done.uses
    assert (use.steps, use.harvested_ns, use.overrun_ns) == (1, 20 * MS, 10 * MS)


def test_the_next_bubbles_steps_begin_after_a_step_that_ran_on():
    done = fill_reserved([iteration((0, 20), (25, 95))], [50 * MS, 70 * MS], StepTimes((30 * MS,)), 30 * MS)
    assert [(use.latency_ns, use.steps) for use in done.uses] == [(0, 1), (5 * MS, 2)]


# Where bubble time goes.


def test_bubble_time_is_split_without_a_rest():
    uses = [BubbleUse(1, 3 * MS, 40 * MS, 0, 5), BubbleUse(2, -1, 7 * MS, 2 * MS, 1)]
    found = split(100 * MS, uses, 2 * MS)
    assert found == BubbleTime(steps=47 * MS, runtime=(3 + 4 * 2) * MS, short=42 * MS)
    assert (found + BubbleTime(memory=MS)).total == 101 * MS


@pytest.fixture(scope="module")
def training() -> SimulatedTraining:
    return SimulatedTraining(main_job(SIZES["3.6B"], 4, 0.087), 3, Varying(passes=0.0, steps=0.0))


@pytest.mark.parametrize("rule", Rule)
def test_a_filled_stage_accounts_for_all_of_its_bubbles(training, rule):
    for stage in range(4):
        done = training.fill(stage, TASKS["ResNet18"].steps[64], compiled=False, rule=rule)
        assert done.time.total == training.bubbles_ns(stage) == training.idle(stage).time.memory
        assert done.overrun_ns == 0
        assert done.time.steps == pytest.approx(done.work / 64 * 31.11 * MS, rel=1e-6)
        assert min(done.time.steps, done.time.runtime, done.time.short) >= 0


def test_bubbles_are_as_long_as_the_training_says(training):
    share = sum(map(training.bubbles_ns, range(4))) / (4 * training.counted_ns)
    assert share == pytest.approx(training.job.bubble_share, rel=1e-3)
    assert training.counted_ns == pytest.approx(3 * training.job.timeline().period_ns, rel=1e-6)


def test_a_task_that_sleeps_10_ms_after_steps_of_3_5_ms_does_a_quarter_of_the_work(training):
    step = TASKS["PageRank"].steps[1]
    ours = training.fill(0, step, compiled=True, rule=Rule.OURS)
    compiled = training.fill(0, step, compiled=True, rule=Rule.FREERIDE)
    python = training.fill(0, step, compiled=False, rule=Rule.FREERIDE)
    assert compiled.work / ours.work == pytest.approx(3.5 / 13.5, rel=0.1)
    assert python.work / ours.work == pytest.approx(3.5 / 8.5, rel=0.1)


# The study and its script.


def defaults(**changes) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sim_freeride.add_options(parser)
    return argparse.Namespace(**vars(parser.parse_args([])) | changes)


@pytest.fixture(scope="module")
def found():
    return sim_freeride.study(defaults(iterations=2))


def test_every_case_is_there_once_and_its_bubble_time_adds_up(found):
    cases = [(row["size"], row["microbatches"], row["task"]) for row in found["tasks"]]
    assert len(set(cases)) == len(cases) == 3 * 3 * 7
    assert len(found["batches"]) == 3 * 9
    for row in found["tasks"] + found["batches"]:
        for rule in Rule:
            assert sum(row[rule]["bubble_time"].values()) == pytest.approx(1)
    assert [row["task"] for row in found["tasks"] if row["artifact"]] == [*TASKS, "mix"]


def test_a_batch_too_large_for_a_stage_does_not_run_there(found):
    runs = {(row["task"], row["batch"]): row["runs"] for row in found["batches"]}
    assert runs["ResNet18", 16] == ["ResNet18"] * 4
    assert runs["ResNet18", 32] == [None, *["ResNet18"] * 3]
    assert runs["VGG19", 128] == [None, None, None, "VGG19"]
    (row,) = (row for row in found["batches"] if (row["task"], row["batch"]) == ("VGG19", 128))
    assert row["ours"]["bubble_time"]["memory"] == pytest.approx(0.75, abs=0.01)


def test_savings_are_the_artifacts_formula(found):
    row = next(row for row in found["tasks"] if row["artifact"] and row["task"] == "VGG19")
    images_per_s = sum(row["ours"]["work_per_iteration"]) / 4.122
    assert saving(row, "ours") == pytest.approx(images_per_s / 161.8 * 0.18 / 3.96, rel=0.02)
    mix = next(row for row in found["tasks"] if row["artifact"] and row["task"] == "mix")
    assert saving(mix, "ours") == mix["ours"]["saving_without_increase"] - mix["ours"]["increase"]


def test_the_tables_fit_a_terminal_and_the_pictures_are_drawn(found, capsys, tmp_path):
    sim_freeride.print_study(found)
    printed = capsys.readouterr().out
    assert "PageRank 1, ResNet18 2, Image 3, VGG19 3 (waits)" in printed
    assert max(map(len, printed.splitlines())) <= 80
    draw_study(tmp_path, json.loads(json.dumps(found)))
    assert {path.name for path in tmp_path.iterdir()} == {
        f"freeride-{name}.png" for name in ("tasks", "batches", "sizes", "time")
    }


def test_the_recorded_summary_is_what_the_recorded_tables_make():
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert recorded["summary"] == sim_freeride.summary(recorded)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--noise much", "argument --noise: 'much' was given; expected a number from 0 to 0.2"),
        ("--step-noise -0.1", "argument --step-noise: '-0.1' was given; expected a number from 0 to 0.2"),
        ("--noise nan", "'nan' was given; expected a number from 0 to 0.2"),
        ("--iterations 0", "argument --iterations: '0' was given; expected a whole number from 1 to 10000"),
        ("--wake-us 1.5", "argument --wake-us: '1.5' was given; expected a whole number from 0 to 1000000"),
        ("--json nowhere/a.json", "argument --json: nowhere: no such folder"),
        ("--png nowhere", "argument --png: nowhere: no such folder"),
    ],
)
def test_wrong_calls_say_what_was_expected(arguments, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sim_freeride.py", *arguments.split()])
    monkeypatch.setattr(sim_freeride, "study", lambda options: pytest.fail("the study began"))
    with pytest.raises(SystemExit) as ended:
        sim_freeride.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
