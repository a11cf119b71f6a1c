"""What the configurator's benchmark reckons with: vTrain's file, turns of trainings, and which orders are tried."""

from __future__ import annotations

import csv
import itertools
import json
import random
import statistics
import subprocess
import sys

import numpy as np
import pytest

from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.flags import read_flags
from megatron.fill.wings.configure.passes import Both, Profile
from scripts.benchmarks.bench_configure import LARGE, MODEL_FLAGS
from scripts.benchmarks.configure_blind import OTHERS, REFERENCE, flags, mean_profile
from scripts.benchmarks.configure_gpu_memory import measure_gpu_memory
from scripts.benchmarks.configure_gpu_memory import read_rows as read_peaks
from scripts.benchmarks.configure_vtrain import COLUMNS, TIME, least_squares, measure_vtrain, read_rows
from scripts.benchmarks.memory_figures import MODELS
from scripts.benchmarks.trainings import ROOT
from scripts.benchmarks.turns import Turn, median_error, periods_s

LAYER_MS = {1: 1.0, 2: 0.75}  # of a micro-batch of one, forward, again and backward, by tensor parallelism
HEADER = ",".join([*COLUMNS, TIME])


def table() -> list[str]:
    """Trainings as they would be if links and everything but the layers took no time."""
    lines = []
    for layers, tp, dp, pp, microbatch, batch in itertools.product(
        (8, 16), (1, 2), (1, 2), (1, 2), (1, 2), (8, 16, 32)
    ):
        passes = batch // dp // microbatch + pp - 1
        time_ms = passes * layers / pp * LAYER_MS[tp] * microbatch
        numbers = (tp * dp * pp, batch, microbatch, 64, 4, layers, 64, tp, dp, pp, time_ms)
        lines.append(",".join(map(str, numbers)))
    random.Random(0).shuffle(lines)
    return lines


@pytest.mark.parametrize("text", [*MODEL_FLAGS.values(), LARGE, *MODELS])
def test_the_flags_of_the_benchmarks_are_known_and_weighed(text):
    assert read_flags(text.split()).ignored == ()


def test_what_is_known_exactly_is_predicted_exactly(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\ufeff" + "\n".join([HEADER, *table()]) + "\n", encoding="utf-8")
    found = measure_vtrain(path)
    assert found["vtrain_rows"] + found["vtrain_profiled"] == len(read_rows(path)) == 96
    assert found["vtrain_profiled"] == 16
    assert found["vtrain_worst"] < 0.01
    assert found["vtrain_worst_regret"] < 0.01


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: [], "has no rows; expected vTrain's ground_truth_single.csv"),
        (lambda lines: [lines[0].replace("# layers", "layers"), lines[1]], "has no column '# layers'"),
        (lambda lines: [lines[0], "x" + lines[1]], "line 2: # GPUs is 'x[0-9]*'; expected a whole number"),
        (lambda lines: [lines[0], "9" + lines[1][1:]], r"line 2: # GPUs is 9; expected tp \* dp \* pp"),
        (lambda lines: [lines[0], lines[1].rsplit(",", 1)[0] + ",fast"], "is 'fast'; expected milliseconds"),
        (lambda lines: [lines[0], lines[1].rsplit(",", 1)[0] + ",nan"], "is 'nan'; expected milliseconds"),
        (lambda lines: [lines[0], lines[1].rsplit(",", 2)[0]], "line 2: pipeline parallelism is ''"),
        (lambda lines: lines[:3], "has 2 rows; expected more than 4 of each kind of pass"),
    ],
)
def test_another_file_is_refused(tmp_path, change, expected):
    path = tmp_path / "t.csv"
    path.write_text("\n".join(change([HEADER, *table()])), encoding="utf-8")
    with pytest.raises(ConfigError, match=expected) as raised:
        measure_vtrain(path)
    assert str(raised.value).startswith(str(path))


def test_least_squares_are_those_without_negative_figures():
    rows = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert least_squares(rows, np.array([1.0, 2.0, 3.0])) == pytest.approx([1, 2])
    assert least_squares(rows, np.array([3.0, -2.0, 2.0])) == pytest.approx([2.5, 0])


def test_only_iterations_that_are_whole_inside_of_a_turn_count_and_not_the_first():
    starts = [0, 10, 21, 33, 46, 100, 150, 210, 280]
    first, last = periods_s(starts, [Turn(5, 50), Turn(40, 140), Turn(100, 300)])
    assert (first, last) == (pytest.approx([12e-9, 13e-9]), pytest.approx([60e-9, 70e-9]))
    with pytest.raises(RuntimeError, match="1 turns of 2 had three iterations; expected more turns"):
        periods_s(starts, [Turn(5, 50), Turn(40, 140)])


def test_twelve_others_are_predicted_and_none_is_the_reference():
    assert len({*map(str, OTHERS.values()), str(REFERENCE)}) == 13
    assert {one.pp for one in OTHERS.values()} == {1, 2}
    assert {one.schedule for one in OTHERS.values()} == {"1f1b", "gpipe", "interleaved"}
    assert "--num-virtual-stages-per-pipeline-rank" in flags(REFERENCE)
    assert flags(OTHERS["gpipe, 4 micro-batches"])[-2:] == ["--fill-pipeline-schedule", "gpipe"]


def test_of_two_profiles_the_mean_counts():
    def profile(at: int, transfer_bytes_s: float | None) -> Profile:
        layer, first, last, fixed = (Both(at * size, at * size + 2) for size in (10, 20, 30, 40))
        return Profile(1, 1, layer, first, last, at * 1e-9, transfer_bytes_s, fixed, step_s=at * 1e-3, waits=1 + at / 8)

    expected = profile(2, 6.0)
    assert mean_profile([profile(1, 6.0), profile(3, None)]) == expected
    assert mean_profile([profile(1, 4.0), profile(3, 8.0)]) == expected


def test_the_standard_error_of_a_median_is_how_far_medians_of_such_values_lie_apart():
    draw = random.Random(0)
    medians = [statistics.median(draw.gauss(10, 2) for _ in range(25)) for _ in range(4000)]
    errors = [median_error([draw.gauss(10, 2) for _ in range(25)]) for _ in range(4000)]
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(medians), rel=0.05)


@pytest.mark.parametrize(("flag", "value", "least"), [("--rounds", "1", 2), ("--each", "2", 3)])
def test_turns_that_tell_nothing_are_refused(flag, value, least):
    command = [sys.executable, "scripts/benchmarks/bench_configure.py", "--parts", "blind", flag, value]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{flag} is {value}: expected {least} or more" in done.stderr


PEAK = "mem_max_allocated_bytes_last_rank"
GPT = {
    "--num-layers": "4",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "64",
    "--global-batch-size": "8",
    "--tensor-model-parallel-size": "1",
    "--pipeline-model-parallel-size": "2",
    "--bf16": "true",
}


def peaks(folder, rows):
    names = ["recipe", "platform", "tp", "pp", "cp", "ep", "impl", PEAK, "flags"]
    with (folder / "megatron_functional_tests.csv").open("w", encoding="utf-8") as file:
        table = csv.DictWriter(file, names)
        table.writeheader()
        for recipe, platform, peak, more in rows:
            its = {"tp": 1, "pp": 2, "cp": 1, "ep": "", "impl": "transformer_engine"}
            table.writerow(its | dict(zip(names[:2], (recipe, platform), strict=True)) | {PEAK: peak, "flags": more})


def test_measured_peaks_are_grouped_and_superseded_ones_told_apart(tmp_path):
    experts = GPT | {"--num-experts": "4", "--moe-router-topk": "1"}
    kinds = [(f"gpt/{name}", GPT) for name in "ab"] + [(f"moe/{name}", experts) for name in "ab"]
    peaks(tmp_path, [(name, "a100", 1, json.dumps(flags)) for name, flags in kinds])
    exact = [row.predicted_bytes for row in read_peaks(tmp_path)]
    rows = [
        (name, "a100", size, json.dumps(flags)) for (name, flags), size in zip(kinds, exact, strict=True) for _ in "123"
    ]
    old = ("gpt/a", "old", 2 * exact[0], json.dumps(GPT))
    odd = ("gpt/odd", "a100", exact[0], json.dumps(GPT | {"--fp8-format": "hybrid"}))
    peaks(tmp_path, [*rows, old, odd])
    found = measure_gpu_memory(tmp_path)
    assert found["expressible"] == 13 / 14
    assert found["dense_mean"] == pytest.approx(0.5 / 7)
    assert found["dense_worst"] == 0.5
    assert found["below_truth"] == 1 / 13
    assert found["dense_mean_current"] == found["experts_mean"] == 0
    assert found["held_by_interval"] == 12 / 13
    assert found["held_by_interval_current"] == 1
    assert "te flash none bf16 experts cp1" in found["groups"]
    assert "FP8" in found["recipes"]["gpt/odd"]


def test_a_table_without_peaks_is_refused(tmp_path):
    (tmp_path / "megatron_functional_tests.csv").write_text("recipe,flags\na,{}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected columns recipe, platform, flags and mem_max"):
        measure_gpu_memory(tmp_path)
