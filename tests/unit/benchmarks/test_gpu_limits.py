"""The limits of the GPU day's steps against the least time that each takes at a slow pace."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from scripts.benchmarks import bench_gpu, gpu_free_waits, gpu_identity, gpu_look, gpu_micro
from scripts.benchmarks.gpu_parts import END_S, START_S
from scripts.benchmarks.gpu_parts import least_s as least_s_of
from scripts.benchmarks.micro import parts as micro_parts
from scripts.benchmarks.micro.parts import ACTOR_S
from tests.unit.benchmarks.test_gpu_day import day

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("look", "smoke", "figures1", "figures2", "stages")
MOST_S = 580  # of the ten minutes that a command may take there
DAY_S = 2220
MACHINE_S = 60  # the start of the machine, out of the same time
SLOW_S = 0.7  # an iteration, as of the larger model on an H100
PACES_S = [SLOW_S * percent / 100 for percent in range(20, 101)]
SMI_S = 3.0  # an answer of nvidia-smi where no other process has the driver open


def steps_of(part: str) -> dict[str, tuple[int, list[str]]]:
    """The steps of a part on a GPU: limit in seconds, and command."""
    listed = day(part, "--device", "cuda", "--list").stdout.splitlines()
    found = [re.findall(r"^ *(\d+) s  ([a-z0-9-]+): (.*)", line)[0] for line in listed]
    return {name: (int(limit), command.split()) for limit, name, command in found}


def test_a_part_takes_less_than_ten_minutes_whatever_its_steps_do_and_all_take_37_minutes():
    limits = [sum(limit for limit, _ in steps_of(part).values()) for part in PARTS]
    assert max(limits) <= MOST_S
    assert MACHINE_S + sum(limits) < DAY_S


@pytest.mark.parametrize("part", PARTS[1:4])
def test_each_training_has_the_time_that_it_takes_at_a_slow_pace(part, monkeypatch):
    paced: set[str] = set()
    trained = 0
    for name, (limit, command) in steps_of(part).items():
        if "scripts/benchmarks/bench_gpu.py" not in command:
            continue
        monkeypatch.setattr(sys, "argv", command[1:])
        _, options = bench_gpu.parsed()
        # A faster pace may need more time, because the blocks in which jobs set themselves up are whole.
        least_s = max(sum(least_s_of(one, options, "cuda", pace_s) for one in options.parts) for pace_s in PACES_S)
        if {"profile", "filled", "identity"} & set(options.parts):
            variant = f"{options.waits} {options.schedule} {options.model}"
            least_s += 0 if variant in paced or options.parts == ["profile"] else START_S + 10 * SLOW_S + END_S
            paced.add(variant)
            trained += options.parts != ["profile"]
        assert least_s <= options.budget_seconds < limit, name
    assert trained >= 2


def test_trainings_of_real_stages_have_the_time_that_they_take_at_a_slow_pace():
    steps = steps_of("stages")
    limit, command = steps["free-waits"]
    options = gpu_free_waits.parsed(command[2:])
    least_s = gpu_free_waits.least_s(options, SLOW_S)
    assert least_s == 2 * (START_S + 10 + 25 * SLOW_S + END_S)
    assert least_s <= options.budget_seconds < limit
    limit, command = steps["losses"]
    options = gpu_identity.parsed(command[2:])
    assert options.iterations * SLOW_S < options.most_seconds
    assert gpu_identity.least_s(options, SLOW_S) == 2 * (START_S + options.most_seconds + 15 * SLOW_S + END_S)
    assert gpu_identity.least_s(options, SLOW_S) <= limit


def test_each_look_has_the_time_that_it_takes():
    steps = steps_of("look")
    _, tried = steps["try"]
    _, tests = steps["tests"]
    micro = gpu_micro.command_line().parse_args(steps["micro"][1][2:])
    files = [ROOT / one for one in tests if one.startswith("tests/gpu/")]
    count = sum(len(re.findall(r"^def test_", file.read_text(encoding="utf-8"), re.MULTILINE)) for file in files)
    least_s = {
        "machine": ACTOR_S + SMI_S * len(gpu_look.ASKED),
        "imports": START_S,  # of a training these are the most
        "try": START_S + 2 * ACTOR_S + float(tried[tried.index("--seconds") + 1]) + END_S,  # measured, then run
        "doctor": START_S,
        "tests": START_S + count * ACTOR_S,  # as if each had a process of its own
        "micro": micro_parts.least_s(micro.seconds, micro.marks),
    }
    assert list(least_s) == list(steps)
    assert {name: least for name, least in least_s.items() if least > steps[name][0]} == {}
