"""What the configurator's benchmark reckons with: its flags, and peaks that others measured."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.flags import read_flags
from megatron.fill.wings.mainjob.kernels import Kernels
from scripts.benchmarks.bench_configure import LARGE, MODEL_FLAGS
from scripts.benchmarks.configure_b200 import published
from scripts.benchmarks.configure_gpu_memory import b200_errors, measure_gpu_memory, read_rows, workspace_bytes
from scripts.benchmarks.configure_gpu_time import measure_gpu_time, read_sailor, read_small
from scripts.benchmarks.configure_recipes import Published, measure_recipes, read_published
from scripts.benchmarks.memory_figures import MODELS


@pytest.mark.parametrize("text", [*MODEL_FLAGS.values(), LARGE, *MODELS])
def test_the_flags_of_the_benchmarks_are_known_and_weighed(text):
    assert read_flags(text.split()).ignored == ()


PEAK = "mem_max_allocated_bytes_last_rank"
NAMES = ("recipe", "platform", "tp", "pp", "cp", "ep", "impl", PEAK, "flags")
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
    with (folder / "megatron_functional_tests.csv").open("w", encoding="utf-8") as file:
        table = csv.DictWriter(file, NAMES)
        table.writeheader()
        for recipe, platform, peak, more in rows:
            its = {"tp": 1, "pp": 2, "cp": 1, "ep": "", "impl": "transformer_engine"}
            table.writerow(its | dict(zip(NAMES[:2], (recipe, platform), strict=True)) | {PEAK: peak, "flags": more})


def test_measured_peaks_are_grouped_and_superseded_ones_told_apart(tmp_path):
    experts = GPT | {"--num-experts": "4", "--moe-router-topk": "1"}
    kinds = [(f"gpt/{name}", GPT) for name in "ab"] + [(f"moe/{name}", experts) for name in "ab"]
    peaks(tmp_path, [(name, "a100", 1, json.dumps(flags)) for name, flags in kinds])
    accounted = read_rows(tmp_path)
    assert all(row.measured_bytes == 1 < row.accounted_bytes < row.error for row in accounted)
    exact = [round(row.margins.shown * row.accounted_bytes) for row in accounted]
    rows = [
        (name, "a100", size, json.dumps(flags)) for (name, flags), size in zip(kinds, exact, strict=True) for _ in "123"
    ]
    old = ("gpt/a", "old", 2 * exact[0], json.dumps(GPT))
    odd = ("gpt/odd", "a100", exact[0], json.dumps(GPT | {"--fp4-format": "e2m1"}))
    peaks(tmp_path, [*rows, old, odd])
    found = measure_gpu_memory(tmp_path)
    assert found["expressible"] == 13 / 14
    assert found["dense_mean"] == pytest.approx(0.5 / 7)
    assert found["dense_worst"] == pytest.approx(0.5)
    assert found["below_truth"] == 1 / 13
    assert found["below_truth_current"] == 0
    assert found["above_interval"] == 1 / 13
    assert found["dense_mean_current"] == pytest.approx(0, abs=1e-6)
    assert found["experts_mean"] == pytest.approx(0, abs=1e-6)
    assert found["held_by_interval"] == 12 / 13
    assert found["held_by_interval_current"] == 1
    assert found["held_by_interval_families"] == 0  # each kind of model has one
    assert found["below_truth_families"] == 1 / 13
    assert found["quantiles"]["dense"]["shown"] == accounted[0].margins.shown
    assert "te flash none bf16 experts cp1" in found["groups"]
    assert "FP4" in found["recipes"]["gpt/odd"]


def test_the_interval_goes_up_to_unfused_attention_where_flags_leave_it_open(tmp_path):
    peaks(tmp_path, [("gpt/a", "a100", 1, json.dumps(GPT | more)) for more in ({}, {"--deterministic-mode": "true"})])
    told, open_ = read_rows(tmp_path)
    assert told.upper_bytes == told.accounted_bytes
    assert open_.upper_bytes > open_.accounted_bytes


def test_a_former_container_has_no_deterministic_flash_attention(tmp_path):
    flags = json.dumps(GPT | {"--deterministic-mode": "true"})
    peaks(tmp_path, [("gpt/a", name, 1, flags) for name in ("lts_dgxa100_dracooci-ord", "lts_dgx_a100")])
    former, current = read_rows(tmp_path)
    assert former.configured_bytes == current.accounted_bytes == current.configured_bytes
    assert former.error_as_configured < former.error
    assert former.accounted_bytes == former.upper_bytes == current.upper_bytes > current.accounted_bytes


def test_a_tokenizer_that_the_flags_name_has_its_own_vocabulary(tmp_path):
    names = (None, "Llama2Tokenizer", "GPTSentencePieceTokenizer")
    kinds = [GPT | ({} if name is None else {"--tokenizer-type": name}) for name in names]
    peaks(tmp_path, [("gpt/a", "a100", 1, json.dumps(flags)) for flags in kinds])
    gpt2, llama, sentences = (row.accounted_bytes for row in read_rows(tmp_path))
    assert llama < gpt2 < sentences


def test_a_shorter_run_is_of_as_many_gpus(tmp_path):
    flags = json.dumps(GPT | {"--use-distributed-optimizer": "true"})
    name = "mixtral/deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release"
    peaks(tmp_path, [(recipe, "gb200", 1, flags) for recipe in (name, f"{name}_sm", "gpt/a")])
    whole, shorter, other = (row.accounted_bytes for row in read_rows(tmp_path))
    assert whole == shorter < other


def test_peaks_of_all_ranks_are_judged_by_stage_and_once_for_each_layout(tmp_path):
    def write(peaks_mb):
        held = {
            str(rank): {"max_allocated_mb": peak, "max_reserved_mb": 1.5 * peak} for rank, peak in enumerate(peaks_mb)
        }
        row = {"case": "llama3_70b_l12_tp1_pp2_dp4_mbc4_cef", "model": "llama3-70b", "layer_num": 12, "real_ms": 1}
        row["peak_memory_by_rank_mb"] = held
        rows = [row | {"mbc": count} for count in (4, 32)]
        (tmp_path / "b200_release_v1.2_summary.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
        return b200_errors(tmp_path)["dense"]

    assert b200_errors(tmp_path) == {}
    found = write([1024] * 4 + [512] * 3 + [2048])
    assert all(share == 0.5 for one in published(tmp_path) for share in one.reserved)
    assert found["peaks"] == 2
    assert found["lowest"] == pytest.approx((1 + write([1024] * 8)["lowest"]) / 2 - 1)  # the last stage's fullest rank


def test_a_table_without_peaks_is_refused(tmp_path):
    (tmp_path / "megatron_functional_tests.csv").write_text("recipe,flags\na,{}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected columns recipe, platform, flags and mem_max"):
        measure_gpu_memory(tmp_path)


def test_measured_times_are_compared_and_choices_between_layouts_judged(tmp_path):
    def write(times):
        with (tmp_path / "megatron_functional_tests.csv").open("w", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow([*NAMES, "iteration_time_median_s"])
            for pp, time_s in zip((2, 4), times, strict=True):
                flags = json.dumps(GPT | {"--pipeline-model-parallel-size": str(pp)})
                table.writerow([f"gpt/pp{pp}", "a100", 1, pp, 1, "", "", 1, flags, time_s])
            table.writerow(["gpt/other", "gb200", 1, 2, 1, "", "", 1, json.dumps(GPT), 1])

    write((1, 1))
    exact = [one.predicted_s() for one in read_small(tmp_path)[0]]
    write(exact)
    found = measure_gpu_time(tmp_path)
    assert found.keys() == {"small", "all_choices", "not_expressible"}
    assert found["all_choices"] == {"choices": 1, "right": 1, "large": 0, "large_right": 0}
    assert found["not_expressible"] == 1
    assert found["small"] == {
        "rows": 2,
        "mean": 0,
        "median": 0,
        "mean_by_one_efficiency": pytest.approx(found["small"]["mean_by_one_efficiency"]),
        "mean_tp1": 0,
        "lowest": 0,
        "lowest_is": "4 layers, 64 wide; tp 1, pp 2, micro-batch 1",
        "highest": 0,
        "jumps": 0,
        "choices": 1,
        "right": 1,
        "large": 0,
        "large_right": 0,
        "tied_right": 1,
        "missed": [],
        "lost_mean": 0,
        "pairs": 1,
        "ratio_mean": pytest.approx(0),
        "ordered": 1,
        "right_beyond_ties": found["small"]["right_beyond_ties"],
        "ordered_from": 0,
    }
    write([1 / one for one in exact])
    wrong = measure_gpu_time(tmp_path)["small"]
    assert (wrong["right"], wrong["ordered_from"]) == (0, None)
    (missed,) = wrong["missed"]
    assert missed.endswith(" behind it")


def test_trainings_over_nodes_and_those_that_a_constant_was_learned_from_are_apart(tmp_path):
    with (tmp_path / "megatron_functional_tests.csv").open("w", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow([*NAMES, "iteration_time_median_s"])
        taught = GPT | {"--hidden-size": "512", "--num-attention-heads": "8"}
        table.writerow(["gpt/a", "a100", 1, 2, 1, "", "", 1, json.dumps(taught), 1])
    names = "Parameters (billion),# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length"
    names += ",tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"
    rows = [f"3.6,16,64,{size},3072,32,30,2048,{tp},{max(1, 8 // tp)},2,{time_ms}" for size, tp, time_ms in _OVER_NODES]
    (tmp_path / "ground_truth_multi.csv").write_text("\ufeff" + "\n".join([names, *rows]), encoding="utf-8")
    found = measure_gpu_time(tmp_path)
    assert found.keys() == {"small_taught", "over_nodes", "all_choices", "not_expressible"}
    assert found["all_choices"]["large"] == 1
    assert found["small_taught"]["rows"] == 1
    assert found["over_nodes"]["rows"] == 5  # of six; the other one has tensor parallelism over nodes
    assert found["over_nodes"]["mean"] < 0.5
    assert {"mean_tp1", "mean_tp2"} < found["over_nodes"].keys()


_OVER_NODES = ((1, 1, 2400), (2, 1, 2300), (1, 2, 2500), (2, 2, 2450), (4, 1, 2350), (1, 16, 9000))


def test_plans_of_gh200_have_the_layers_that_they_name(tmp_path):
    def write(name, layers, dp):
        stages = [[[[["GH-96", 4, "zone"]], 4]] * dp for _ in layers]
        line = {
            "num_stages": len(layers),
            "layers_per_stage": [[0] * count for count in layers],
            "dp": [dp] * len(layers),
        }
        plan = {"pipeline_list": [line | {"tmp_per_stage": stages}], "mbs": 8, "gbs": 512, "real": 2.0}
        path = tmp_path / "clariden" / "OPT-350" / "N8" / f"plan_config_{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plan), encoding="utf-8")

    write("a", (5, 7, 7, 7), 2)
    write("b", (26,), 8)
    write("other", (34,), 8)  # of another model
    pipeline, replicas = read_sailor(tmp_path)["sailor"]
    assert pipeline.parallel.stage_layers == (4, 7, 7, 6)
    assert (replicas.parallel.pp, replicas.parallel.dp) == (1, 8)
    assert replicas.choice == pipeline.choice
    assert 0 < replicas.predicted_s() < pipeline.predicted_s()


def test_published_layouts_are_read_and_looked_for(tmp_path):
    head = "| System | #-GPUs | Precision | GBS | MBS | Sequence Length "
    head += "| FSDP | TP | PP | CP | VP | EP | Tokens / sec / GPU |"
    rows = ["DGX-B200 | 8 | FP8-CS (FP8-MX) | 128 | 2 | 8192 | 0 | 1 | 1 | 1 | n/a | 1 | 30624 (29521)"]
    rows += ["DGX-B200 | 8 | FP8 | 128 | 1 | 8192 | 0 | 8 | 1 | 1 | n/a | 1 | 9", rows[0].replace("| 0 |", "| 8 |", 1)]
    rows += [rows[0].replace("| 8 |", "| 512 |", 1)]
    text = ["## 25.11", "### Pre-Training Performance", "#### Model: LLAMA3_8B", head, *(f"| {row} |" for row in rows)]
    (tmp_path / "performance-summary.md").write_text("\n".join(text), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"performance-summary-archive\.md: cannot be read"):
        read_published(tmp_path)
    (tmp_path / "performance-summary-archive.md").write_text("", encoding="utf-8")
    newest = read_published(tmp_path)[0]
    assert (newest.shape, newest.precision, newest.tokens_s) == ((1, 1, 1, 1, 1, 2), "FP8", 30624)
    found = measure_recipes(tmp_path, most_gpus=8)
    assert (found["published"], found["expressible"]) == (2, 1)
    names = ("recipes", "exactly", "named", "alone")
    assert {found[f"{name}_in_first_five"] for name in names} == {1.0}
    assert "large" not in found
    row = found["rows"]["LLAMA3_8B on 8 B200, FP8, 128"]
    assert row["shape"] == "1 1 1 1 1 2"
    assert row["error"] == pytest.approx(found["time_mean"])
    with pytest.raises(ConfigError, match="no table has a training on at most 7 GPUs"):
        measure_recipes(tmp_path, most_gpus=7)


def test_a_published_training_has_the_flags_of_its_recipe():
    one = Published("Qwen3_30B_a3B", "DGX-GB300", "MXFP8", 8, 512, 4096, False, (1, 1, 1, 8, 1, 8), 1.0)
    known, other = one.training(), replace(one, batch=64).training()
    assert {"hybridep", "full_iteration", "--overlap-moe-expert-parallel-comm"} < set(known.others) - set(other.others)
    assert known.fixed == other.fixed == {"expert_tp": 1}
    assert not {"--moe-grouped-gemm", "--cuda-graph-impl"} & set(known.ignored)


def test_workspaces_follow_the_generation():
    mib = 1 << 20
    engine = Kernels(transformer_engine=True)
    assert [workspace_bytes(engine, major) / mib for major in (8, 9, 10)] == [20.25, 96, 96]
    assert workspace_bytes(Kernels(deterministic=True), 8) == 64 * mib
    assert [workspace_bytes(Kernels(), major, routed=True) / mib for major in (8, 9)] == [20.25, 96]
