"""What the configurator's benchmark reckons with: its flags, and peaks that others measured."""

from __future__ import annotations

import csv
import json

import pytest

from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.flags import read_flags
from scripts.benchmarks.bench_configure import LARGE, MODEL_FLAGS
from scripts.benchmarks.configure_gpu_memory import measure_gpu_memory, read_rows
from scripts.benchmarks.memory_figures import MODELS


@pytest.mark.parametrize("text", [*MODEL_FLAGS.values(), LARGE, *MODELS])
def test_the_flags_of_the_benchmarks_are_known_and_weighed(text):
    assert read_flags(text.split()).ignored == ()


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
    exact = [row.predicted_bytes for row in read_rows(tmp_path)]
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
    assert found["held_by_interval_families"] == 0  # each kind of model has one
    assert "te flash none bf16 experts cp1" in found["groups"]
    assert "FP8" in found["recipes"]["gpt/odd"]


def test_the_interval_goes_up_to_unfused_attention_where_flags_leave_it_open(tmp_path):
    peaks(tmp_path, [("gpt/a", "a100", 1, json.dumps(GPT | more)) for more in ({}, {"--deterministic-mode": "true"})])
    told, open_ = read_rows(tmp_path)
    assert told.upper_bytes == told.predicted_bytes
    assert open_.upper_bytes > open_.predicted_bytes


def test_a_table_without_peaks_is_refused(tmp_path):
    (tmp_path / "megatron_functional_tests.csv").write_text("recipe,flags\na,{}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected columns recipe, platform, flags and mem_max"):
        measure_gpu_memory(tmp_path)
