"""``pipefill configure`` and ``pipefill pays``: tables, files, and what they say of wrong input."""

from __future__ import annotations

import json
import random
import re
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatron.fill.cli.app import app
from megatron.fill.errors import ConfigError
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.pipeline.torch_csv import dump_csv
from megatron.fill.wings.configure.commands.configure import _gib
from megatron.fill.wings.configure.flags import read_flags
from megatron.fill.wings.configure.network import Network, Place
from megatron.fill.wings.configure.passes import Both
from megatron.fill.wings.configure.pays import figures
from megatron.fill.wings.configure.peaks import laid_out
from megatron.fill.wings.configure.ranked import ERROR, MODEL_ERROR
from tests.support.configuring import random_links
from tests.wings.configure.test_configure_passes import FLAGS as PROFILE_FLAGS
from tests.wings.configure.test_configure_passes import ran

FLAGS = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --vocab-size 32000 "
    "--global-batch-size 32 --bf16 --tokenizer-type NullTokenizer"
)
CLUSTER: dict[str, Any] = {"nodes": 2, "gpus_per_node": 4, "gpu": "a100-80gb", "network": "dgx-a100"}
NETWORK = {"name": "mine", "intra_node_bytes_s": 1e11, "inter_node_bytes_s": 1e10}
OWN = {"name": "mine", "peak_flops": 1e12, "memory_bytes": 2**34, "memory_bandwidth": 1e12, "host_bytes_s": 1e10}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def measured() -> Network:
    """Two nodes of four, whose links differ."""
    links = random_links(random.Random(1), 8, 1)
    ranks = tuple(Place(f"n{rank // 4}", rank % 4) for rank in range(8))
    speeds = tuple(
        tuple(None if one == other else links.bytes_per_s[one][other] for other in range(8)) for one in range(8)
    )
    latency = tuple(tuple(0.0 if one == other else 1e-5 for other in range(8)) for one in range(8))
    return Network(ranks, speeds, latency, latency, "gloo", "2026-01-31T18:00:00+00:00")


def run(*options: str, cluster: dict[str, Any] | None = None, flags: str = FLAGS) -> str:
    with open("c.yaml", "w", encoding="utf-8") as file:
        yaml.safe_dump(CLUSTER if cluster is None else cluster, file)
    result = CliRunner().invoke(app, ["configure", "c.yaml", *options, "--", *flags.split()])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table_has_the_best_in_80_columns(folder):
    lines = run("--top", "4", "--json", "o.json").splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(" none " in line or " selective " in line or " full " in line for line in lines) == 4
    assert lines[0].split() == ["TIME", "MEMORY", "BUBBLE", "FILL"]
    assert lines[1].split()[-4:] == ["S", "GIB", "SHARE", "GPUS"]
    found = json.loads((folder / "o.json").read_text())
    times = [one["iteration_s"] for one in found["best"]]
    assert times == sorted(times)
    assert f"{times[0]:.4g}" in lines[2]
    assert any(line.startswith("Why row 1 before row 2: ") for line in lines)
    assert found["configurations"] >= found["timed"] >= 4
    assert all(one["memory_bytes"] <= 78 * 2**30 for one in found["best"])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--gpus", "8"], "--gpus comes after --, where Megatron's flags are; expected it before --"),
        (["--gpsu", "8"], "--gpsu is no flag of Megatron"),
        (["--recompute-granularity", "full"], "is full without --recompute-method; expected both"),
        (
            ["--recompute-granularity", "full", "--recompute-method", "uniform"],
            "is full without --recompute-num-layers; expected both",
        ),
        (["--hidden-size", "65536"], "this layout does not fit 1 x a100-80gb: it needs "),
    ],
)
def test_pays_refuses_what_megatron_would_not_start(flags, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        pays("--", *FLAGS.split(), *flags)


def test_configure_adds_what_full_recomputation_needs():
    assert "full" in run("--top", "1", flags=f"{FLAGS} --recompute-granularity full")


def test_virtual_stages_that_tie_are_named_below_the_table(folder):
    """Each layout has one row; the others that tie with it are all in the JSON."""
    fixed = f"{FLAGS} --pipeline-model-parallel-size 4"
    output = run("--top", "4", "--json", "o.json", flags=fixed)
    assert max(map(len, output.splitlines())) <= 80
    best = json.loads((folder / "o.json").read_text())["best"]
    names = ("tp", "pp", "dp", "cp", "ep", "microbatch")
    layouts = [[one["parallel"][name] for name in names] for one in best]
    assert len(layouts) == 4 == len(set(map(tuple, layouts)))
    said = " ".join(output.split())
    assert any(row["tied"] for row in best)
    for number, row in enumerate(best, 1):
        chunks = {one["parallel"]["chunks"] for one in row["tied"]} - {row["parallel"]["chunks"]}
        listed = f"row {number}: {', '.join(map(str, sorted(chunks)))}"
        assert listed in said if chunks else listed not in said.partition("The best of")[0]
        for one in row["tied"]:
            assert [one["parallel"][name] for name in names] == [row["parallel"][name] for name in names]
            assert one["iteration_s"] <= (1 + MODEL_ERROR) * row["iteration_s"]
            assert {"flags", "order", "memory_bytes"} <= one.keys()


def test_the_table_has_80_columns_with_large_figures_too():
    """GPUs have a column of their own where rows have different numbers of them."""
    large = CLUSTER | {"nodes": 256, "gpu": "b200", "price_per_gpu_hour": 4.5}
    flags = f"{FLAGS} --num-layers 80 --hidden-size 8192 --num-attention-heads 64 --global-batch-size 1024"
    lines = run("--top", "3", cluster=large, flags=f"{flags} --micro-batch-size 16").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[:2] == ["#", "TP"]
    assert any(line.startswith("The best of ") and " configurations on 1,024 GPUs, " in line for line in lines)
    few = run("--top", "300", "--objective", "cost", cluster=CLUSTER | {"price_per_gpu_hour": 1.0})
    assert few.splitlines()[1].split()[:3] == ["#", "GPUS", "TP"]
    assert max(map(len, few.splitlines())) <= 80
    assert "…" not in few


def test_the_memory_of_small_models_is_no_nought():
    small: Any = SimpleNamespace(peak_bytes=12 << 20, interval_bytes=(11 << 20, 13 << 20))
    assert [_gib(small, places) for places in (0, 1)] == ["<1", "0.012 (0.011-0.013)"]


def test_the_picture_has_a_row_for_each_of_the_best(folder):
    run("--top", "2", "--png", "two.png")
    run("--top", "6", "--png", "six.png")
    heights = []
    for name in ("two.png", "six.png"):
        data = (folder / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        heights.append(int.from_bytes(data[20:24]))
    assert heights[1] > heights[0] + 150


def test_the_script_starts_the_best_one_in_its_order(folder):
    measured().save(folder / "net.json")
    cluster = {name: value for name, value in CLUSTER.items() if name != "network"} | {"measured": "net.json"}
    flags = f"{FLAGS} --pipeline-model-parallel-size 8"
    run("--top", "1", "--launch", "go.sh", "--json", "o.json", cluster=cluster, flags=flags)
    best = json.loads((folder / "o.json").read_text())["best"][0]
    order = json.loads((folder / "go.order.json").read_text())["order"]
    assert order == best["order"]
    assert sorted(order) == list(range(8))
    assert order != list(range(8))
    with pytest.raises(ConfigError, match="--use-tp-pp-dp-mapping on a measured network: expected it left out"):
        run(cluster=cluster, flags=f"{flags} --use-tp-pp-dp-mapping")
    (folder / "bin").mkdir()
    (folder / "bin" / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (folder / "bin" / "torchrun").chmod(0o755)
    said = subprocess.run(
        ["./go.sh", "--more"], env={"PATH": f"{folder}/bin:/usr/bin:/bin"}, text=True, capture_output=True, check=True
    ).stdout
    assert "--nnodes 2 --nproc-per-node 4 --node-rank 0" in said
    assert "--tokenizer-type NullTokenizer --tensor-model-parallel-size 1 --pipeline-model-parallel-size 8" in said
    assert said.endswith(f"--fill-rank-order {folder}/go.order.json --more\n")


def test_the_script_has_no_flag_with_which_megatron_would_not_start_the_layout(folder):
    overlaps = "--overlap-grad-reduce --overlap-param-gather --tp-comm-overlap"
    flags = f"{FLAGS} {overlaps} --pipeline-model-parallel-size 4 --tensor-model-parallel-size"
    four = CLUSTER | {"nodes": 1}
    run("--top", "1", "--launch", "one.sh", cluster=four, flags=f"{flags} 1")
    run("--top", "1", "--launch", "two.sh", flags=f"{flags} 2")
    one, two = ((folder / name).read_text() for name in ("one.sh", "two.sh"))
    assert "--overlap-grad-reduce" in one
    assert not {"--tp-comm-overlap", "--overlap-param-gather", "--use-distributed-optimizer"} & set(one.split())
    assert {"--tp-comm-overlap", "--sequence-parallel"} <= set(two.split())


def test_filling_can_change_what_is_best_and_cost_weighs_fewer_nodes(folder):
    run("--top", "3", "--objective", "combined", "--json", "a.json", flags=f"{FLAGS} --micro-batch-size 1")
    run(
        *("--top", "8", "--objective", "cost", "--json", "b.json"),
        cluster=CLUSTER | {"price_per_gpu_hour": 2},
        flags=f"{FLAGS} --micro-batch-size 1",
    )
    combined, cost = (json.loads((folder / name).read_text())["best"] for name in ("a.json", "b.json"))
    net = [one["iteration_s"] * (one["gpus"] - one["gpus_worth"]) for one in combined]
    assert net == sorted(net)
    prices = [one["cost"] for one in cost]
    assert prices == sorted(prices)
    assert {one["gpus"] for one in cost} >= {4}
    assert cost[0]["cost"] == pytest.approx(
        cost[0]["iteration_s"] * (cost[0]["gpus"] - cost[0]["gpus_worth"]) * 2 / 3600
    )


def test_jobs_of_a_file_fill(folder):
    (folder / "jobs.yaml").write_text("jobs:\n- {name: bert-base-inference, task: 'a:b'}\n")
    run("--fill", "jobs.yaml", "--top", "1", "--json", "a.json", flags=f"{FLAGS} --pipeline-model-parallel-size 4")
    run("--top", "1", "--json", "b.json", flags=f"{FLAGS} --pipeline-model-parallel-size 4")
    assert (folder / "a.json").read_text() == (folder / "b.json").read_text()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"nodes": 0}, "c.yaml, line 4: nodes is 0: expected greater than or equal to 1"),
        ({"gpu": "abacus"}, "gpu is 'abacus': expected one of v100-16gb"),
        ({"measured": "net.json"}, "expected exactly one of network and measured"),
        ({"gpux": 1}, "unknown field gpux"),
        ({"measured": 3}, "measured is 3: expected the path of a file"),
        ({"nodes": True}, "c.yaml, line 4: nodes is True: expected a number"),
        ({"efficiency": True}, "efficiency is True: expected a number"),
        ({"gpu": OWN | {"peak_flops": 1e-300}}, r"gpu: peak_flops is 1e-300; expected 1e\+06 to 1e\+30 per second"),
        ({"gpu": OWN | {"sustained": 1e-300}}, "sustained is 1e-300; expected a share from 0 to 1, 0.001 or more if"),
        ({"efficiency": 1e-300}, r"efficiency is 1e-300: expected greater than or equal to 0.001"),
        ({"network": NETWORK | {"latency_s": 1e300}}, r"network: latency_s is 1e\+300; expected 0 to 1 seconds"),
        ({"network": NETWORK | {"inter_node_bytes_s": 1}}, r"network: expected 1e\+06 bytes per second or more"),
        ({"gpu": OWN | {"host_bytes_s": 1e300}}, r"gpu: host_bytes_s is 1e\+300; expected 1e\+06 to 1e\+30"),
        (
            {"memory": "40GiB", "memory_reserve": "100GiB"},
            r"c.yaml, line \d+: memory_reserve is '100GiB': expected less than the memory of a GPU, 40 GiB",
        ),
        ({"gpu": OWN | {"memory_bytes": 2**30}}, "memory_reserve is .*: expected less than the memory of a GPU, 1 GiB"),
        ({"gpu": ...}, "gpu is missing"),
        ({"gpu": OWN | {"sustained": 0}}, r"c.yaml, line \d+: gpu: sustained is 0.0; expected more than 0"),
        ({"gpu": OWN | {"flash_attention": -1}}, "gpu: flash_attention is -1.0; expected a share from 0 to 1"),
        ({"intra_node_share": 7}, "intra_node_share is 7: expected less than or equal to 1"),
    ],
)
def test_a_wrong_cluster_is_named(change, expected):
    cluster = {name: value for name, value in (CLUSTER | change).items() if value is not ...}
    with pytest.raises(ConfigError, match=expected):
        run(cluster=cluster)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (
            "bandwidth_bytes_per_s",
            [[None, 1.0], [1.0, None]],
            "bandwidth_bytes_per_s has 2 rows: expected 8",
        ),
        ("latency_s", "fast", r"net.json: latency_s is 'fast': expected a list of rows"),
        ("ranks", [{"host": "n", "local_rank": rank} for rank in range(8)], r"ranks has \[8\] per host; expected 2"),
    ],
)
def test_a_wrong_network_is_named(folder, field, value, expected):
    measured().save(folder / "net.json")
    data = json.loads((folder / "net.json").read_text())
    (folder / "net.json").write_text(json.dumps(data | {field: value}))
    cluster = {name: value for name, value in CLUSTER.items() if name != "network"} | {"measured": "net.json"}
    with pytest.raises(ConfigError, match=expected):
        run(cluster=cluster)


def test_a_wrong_objective_and_a_cost_without_a_price_are_refused(folder):
    with pytest.raises(ConfigError, match="--objective is 'fast': expected one of main, combined, cost"):
        run("--objective", "fast")
    with pytest.raises(ConfigError, match="price_per_gpu_hour is missing"):
        run("--objective", "cost", "--launch", "go.sh")
    assert not (folder / "go.sh").exists()


def test_a_profile_that_is_none_is_refused(folder):
    with pytest.raises(ConfigError, match="nowhere: is no folder; expected a run folder"):
        run("--profile", "nowhere")
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty/records: holds no records"):
        run("--profile", "empty")


def test_what_a_profile_does_not_tell_is_said_and_how_far_it_can_be_off(folder):
    flags = f"{PROFILE_FLAGS} --global-batch-size 8"
    told = "The run with tensor parallelism 1 and micro-batches of 1 does not tell "
    ran(folder / "alike")
    pass_, step = "what a pass takes beside its layers", "what a step takes beside its parameters"
    said = run("--profile", "alike", flags=flags)
    assert f"{told}{pass_} or {step}." in said
    assert f"rows within {ERROR:.1%} of" in said
    assert f"rows within {MODEL_ERROR:.1%} of" in run(flags=flags)
    ran(folder / "unlike", first_layers=2, fixed=Both(2e6, 1e6), step_ns=1_000_000)
    assert told not in run("--profile", "unlike", flags=flags)


def pays(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["pays", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_pays_says_when_it_does_and_when_it_does_not():
    layout = [*FLAGS.split(), "--pipeline-model-parallel-size", "8"]
    said = json.loads(pays("--json", "--", *layout))
    assert said["pays"]
    assert 0.1 < said["gpus_worth"] / said["gpus"] < said["bubble_share"]
    assert "does the work of" in pays("--", *layout)
    assert pays("--gpus", "8", "--", *FLAGS.split(), "--tensor-model-parallel-size", "8").endswith(
        "Filling does not pay: inference of BERT-base would do the work of 0.00 GPUs in them.\n"
        "A pipeline of one stage has no bubbles.\n"
    )
    with pytest.raises(ConfigError, match="--gpus is 100000: expected at most 32768, 4096 nodes"):
        pays("--gpus", "100000", "--", *layout)
    with pytest.raises(ConfigError, match="--fp8-format on a100-80gb: expected GPUs of compute capability"):
        pays("--", *layout, "--fp8-format", "hybrid")
    with pytest.raises(ConfigError, match="--gpu is 'abacus'"):
        pays("--gpu", "abacus", "--", *layout)


@pytest.mark.parametrize(
    "layout",
    [
        "--vocab-size 256000",  # whose output layer makes the last of four equal stages the slowest
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--tensor-model-parallel-size 2 --use-distributed-optimizer",
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --seq-length 1004",
        "--num-layers 15 --num-layers-per-virtual-pipeline-stage 2 --account-for-embedding-in-pipeline-split",
        "--tensor-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --sequence-parallel",
    ],
)
def test_pays_evaluates_the_layout_of_the_flags_and_searches_nothing(layout):
    flags = [*FLAGS.split(), "--pipeline-model-parallel-size", "4", *layout.split()]
    assert figures(read_flags(flags), 16, "a100-80gb", "dgx-a100").proposal.parallel == laid_out(flags, 16)[1]


def test_pays_has_ranks_enough_for_the_experts():
    experts = (
        "--disable-bias-linear --num-experts 8 --expert-model-parallel-size 8 --pipeline-model-parallel-size 2 "
        "--context-parallel-size 2"
    )
    assert json.loads(pays("--json", "--", *FLAGS.split(), *experts.split()))["gpus"] == 16


def test_pays_fills_nodes_where_a_replica_does_not():
    layout = "--num-layers 9 --pipeline-model-parallel-size 3 --tensor-model-parallel-size 4"
    assert json.loads(pays("--json", "--", *FLAGS.split(), *layout.split()))["gpus"] == 24  # not 12, on nodes of 8


@pytest.mark.parametrize("batch", ["2147483647", str(2**30)])
def test_a_batch_that_would_take_hours_to_time_is_refused(batch):
    flags = [*FLAGS.split(), "--global-batch-size", batch]
    with pytest.raises(ConfigError, match="at most 200,000 passes, two for each micro-batch and virtual stage"):
        pays("--", *flags, "--pipeline-model-parallel-size", "4")
    with pytest.raises(ConfigError, match="at most 200,000 passes"):
        run(cluster=CLUSTER | {"nodes": 1, "gpus_per_node": 1}, flags=" ".join(flags))


def test_pays_counts_one_gpu_as_one():
    assert re.match(r"An iteration takes [\d.]+ s on 1 GPU; ", pays("--", *FLAGS.split()))


def test_fewer_query_groups_than_tensor_parallel_ranks_are_taken():
    """Each rank has the keys of one group then, as with as many groups as ranks."""
    layout = [*FLAGS.split(), "--tensor-model-parallel-size", "4", "--group-query-attention", "--num-query-groups"]
    few, many = (json.loads(pays("--json", "--", *layout, groups)) for groups in ("2", "4"))
    assert few == many
    with pytest.raises(ConfigError, match="divides heads, query groups"):
        pays("--", *layout, "3", "--num-attention-heads", "12", "--hidden-size", "1536")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--seq-length 255 --tensor-model-parallel-size 2 --sequence-parallel", "--seq-length 255: expected that with"),
        ("--global-batch-size 15", "with --global-batch-size 15: expected that --global-batch-size is a multiple"),
        ("--ffn-hidden-size 511 --tensor-model-parallel-size 2", "shared experts: 8, 8, 511 and 0"),
        (
            "--global-batch-size 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            "with --global-batch-size 4, --pipeline-model-parallel-size 2: expected that virtual stages have groups",
        ),
    ],
)
def test_a_layout_that_does_not_go_is_told_with_its_values(flags, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        pays("--gpus", "8", "--", *FLAGS.split(), *flags.split())


def test_flags_that_are_not_weighed_are_named():
    flags = "--use-nccl-ub --use-distributed-optimizer --lr 1e-3"
    for command in (["configure", "c.yaml", "--top", "1"], ["pays", "--gpus", "8"]):
        run("--top", "1")
        result = CliRunner().invoke(app, [*command, "--", *FLAGS.split(), *flags.split()])
        assert result.exit_code == 0, result.output
        assert "Not weighed, though they change time or memory: --use-nccl-ub." in result.output


def test_an_attention_that_flags_leave_open_is_named():
    said = "--deterministic-mode without --attention-backend"
    assert said in run(flags=f"{FLAGS} --deterministic-mode")
    assert said not in run(flags=f"{FLAGS} --deterministic-mode --attention-backend unfused")
    assert said not in run(flags=f"{FLAGS} --deterministic-mode", cluster=CLUSTER | {"gpu": "h100-80gb"})


def test_attention_that_flags_leave_open_is_why_nothing_fits():
    """What is said to be needed is more than there is room for."""
    long = "--seq-length 65536 --max-position-embeddings 65536 --attention-dropout 0"
    flags = [*FLAGS.split(), *long.split(), "--deterministic-mode"]
    with pytest.raises(ConfigError) as caught:
        pays("--gpus", "1", "--", *flags)
    needed, most, room = map(float, re.findall(r"([0-9.]+) GiB", str(caught.value)))
    assert needed < room < most
    assert "with unfused attention, which --attention-backend can exclude" in str(caught.value)
    assert "An iteration takes" in pays("--gpus", "1", "--gpu", "h100-80gb", "--", *flags)
    assert "An iteration takes" in pays("--gpus", "1", "--", *flags, "--attention-backend", "flash")


def test_stages_of_unlike_layers_are_named():
    lines = run("--top", "1", flags=f"{FLAGS} --num-layers 30 --pipeline-model-parallel-size 4").splitlines()
    assert lines[3] == "Row 1: its virtual stages have 0 to 2 layers, the last 0."  # which has the loss
    alone = f"{FLAGS} --num-layers 30 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 1"
    assert ": of its stages, the first has 7 layers, the last has 7 layers.\n" in run("--top", "9", flags=alone)
    one = run("--top", "9", flags=f"{alone} --decoder-last-pipeline-num-layers 3")
    assert ": of its stages, the last has 3 layers.\n" in one


def test_layers_of_the_ends_hold(folder):
    """As Megatron has it, those between are divided evenly, and each rank's among its virtual stages."""
    layout = f"{FLAGS} --num-layers 14 --pipeline-model-parallel-size 4"
    ends = "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 4"
    both = json.loads(pays("--json", "--", *layout.split(), *ends.split()))
    virtual = "--num-virtual-stages-per-pipeline-rank 2"
    assert json.loads(pays("--json", "--", *layout.split(), *ends.split(), *virtual.split()))["iteration_s"] > 0
    run("--json", "o.json", flags=f"{layout} {ends} --micro-batch-size 1")
    best = json.loads((folder / "o.json").read_text())["best"]
    assert {one["parallel"]["first_layers"] for one in best} == {2}
    assert {one["parallel"]["chunks"] for row in best for one in (row, *row["tied"])} == {1, 2}
    assert both["iteration_s"] >= min(one["iteration_s"] for one in best)
    for wrong, said in {
        "--decoder-first-pipeline-num-layers 3": "--decoder-first-pipeline-num-layers is 3; expected layers left",
        f"{ends} {virtual} --num-layers 12": "not 6 of 12",
        f"{ends} --num-layers-per-virtual-pipeline-stage 1": "--num-virtual-stages-per-pipeline-rank in its place",
    }.items():
        with pytest.raises(ConfigError, match=said):
            pays("--", *layout.split(), *wrong.split())


def test_layers_that_megatron_cannot_divide_do_not_pay():
    flags = f"{FLAGS} --num-layers 30 --pipeline-model-parallel-size 4"
    result = CliRunner().invoke(app, ["pays", "--gpus", "8", "--", *flags.split()])
    assert isinstance(result.exception, ConfigError)
    assert "--num-layers is 30: expected a multiple of the 4 stages" in str(result.exception)


def test_pays_weighs_a_schedule_from_a_file(folder):
    layout = [*FLAGS.split(), "--pipeline-model-parallel-size", "4"]
    usual = json.loads(pays("--json", "--", *layout))
    for name, order in (("1f1b", "1f1b"), ("own", "1f1b"), ("zb-h1", "zb-h1"), ("gpipe", "zb-h1")):
        dump_csv(folder / f"{name}.csv", make_schedule(order, 4, 32))
    named_1f1b, own, zb_h1, named_gpipe = (
        json.loads(pays("--json", "--schedule", f"{name}.csv", "--", *layout))
        for name in ("1f1b", "own", "zb-h1", "gpipe")
    )
    assert named_1f1b == own == usual
    assert named_gpipe == zb_h1
    assert zb_h1["iteration_s"] < usual["iteration_s"]


def test_pays_weighs_stages_in_a_v(folder):
    layers = "--num-layers-per-virtual-pipeline-stage", str(int(FLAGS.split("--num-layers ")[1].split()[0]) // 8)
    layout = [*FLAGS.split(), "--pipeline-model-parallel-size", "4", *layers]
    dump_csv(folder / "in-turn.csv", make_schedule("interleaved", 4, 32, 2))
    dump_csv(folder / "v.csv", make_schedule("zb-v", 4, 32, 2))
    usual, in_turn, v = (
        json.loads(pays("--json", *given, "--", *layout))
        for given in ((), ("--schedule", "in-turn.csv"), ("--schedule", "v.csv"))
    )
    assert in_turn == usual
    assert v["bubble_share"] < usual["bubble_share"]
    text = (folder / "v.csv").read_text().splitlines()
    (folder / "far.csv").write_text("\n".join([text[0], text[2], text[1], text[3]]))
    with pytest.raises(ConfigError, match=r"far: stage .* expected neighbours"):
        pays("--schedule", "far.csv", "--", *layout)


def test_pays_says_what_is_wrong_with_the_file_of_a_schedule(folder):
    layout = [*FLAGS.split(), "--pipeline-model-parallel-size", "4"]
    dump_csv(folder / "few.csv", make_schedule("1f1b", 2, 32))
    dump_csv(folder / "short.csv", make_schedule("1f1b", 4, 8))
    (folder / "not.csv").write_text("0F0,what\n")
    for name, problem in {
        "few.csv": "it has 2 ranks: expected 4, as the training has",
        "short.csv": "it has 8 microbatches: expected 32, as the training has",
        "not.csv": "line 1, cell 2: 'what' is not an action",
        "none.csv": "none.csv",
    }.items():
        with pytest.raises(ConfigError, match=problem) as caught:
            pays("--schedule", name, "--", *layout)
        assert "\n" not in str(caught.value)
