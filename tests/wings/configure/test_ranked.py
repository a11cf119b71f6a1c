"""Ranks of configurations with ties, and the reason why one comes before another."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.flags import read_flags
from megatron.fill.wings.configure.latency import timeline
from megatron.fill.wings.configure.ranked import ERROR, parts, ranks, why
from megatron.fill.wings.configure.rows import layout_of, safer
from megatron.fill.wings.configure.search import Evaluator, Proposal, search
from megatron.fill.wings.configure.value import Valued

FLAGS = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --vocab-size 32000 "
    "--global-batch-size 32 --bf16"
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], []),
        ([1.0, 2.0, 3.0], [1, 2, 3]),
        ([1.0, 1.0 + ERROR / 2, 1.0 + 2 * ERROR, 1.0 + 3 * ERROR], [1, 1, 3, 3]),
        ([1.0, 1.0 + 0.9 * ERROR, 1.0 + 1.8 * ERROR], [1, 1, 3]),  # ties are with the fastest of a rank
        ([1.0 + 0.9 * ERROR, 1.0, 1.0 + 1.8 * ERROR], [1, 1, 3]),
    ],
)
def test_rows_within_the_error_are_ties(values, expected):
    assert ranks(values) == expected


EXPERTS = (
    "--disable-bias-linear --num-experts 16 --moe-router-topk 2 --moe-grouped-gemm --sequence-parallel "
    "--seq-length 4096"
)


@pytest.mark.parametrize("more", ["", EXPERTS])
def test_ties_that_leave_room_and_share_experts_out_in_a_node_come_first(more):
    fields = {"nodes": 2, "gpus_per_node": 4, "gpu": "a100-40gb", "memory": "12GiB", "network": "dgx-a100"}
    cluster = Cluster.model_validate(fields | ({} if more else {"memory": "3GiB", "memory_reserve": "64MiB"}))
    training = read_flags([*FLAGS.split(), *more.split()])
    error = 0.3 if more else 0.5

    def rows(top: int) -> list[list[Proposal]]:
        found = search(Evaluator(training, cluster, cluster.links(Path())), top, error=error).rows
        return [list(row) for row in found]

    found = rows(400)
    fastest_s = min(one.iteration_s for row in found for one in row)
    ties = [row for row in found if row[0].iteration_s <= (1 + error) * fastest_s]
    others = [row[0].iteration_s for row in found[len(ties) :]]
    assert found[: len(ties)] == ties
    assert others == sorted(others)
    # EP of 8 is over both nodes: a half of its exchange is between them
    shared = {1: 1, 2: 2, 4: 4, 8: 2}
    keys = [(one.peak_bytes > 0.9 * one.room_bytes, -shared[one.parallel.ep], one.iteration_s) for one, *_ in ties]
    assert keys == sorted(keys)
    assert {key[0] for key in keys} == {False, True}
    assert rows(2) == found[:2]
    first, last = ties[0][0], ties[-1][0]
    assert safer(first, last, 4) == "it leaves a tenth of the room free"
    assert safer(last, first, 4) == ""


def test_a_row_has_the_virtual_stages_that_tie():
    """Of one layout, each within the error of the fastest; none of another row has its sizes."""
    cluster = Cluster.model_validate({"nodes": 1, "gpus_per_node": 8, "gpu": "a100-80gb", "network": "dgx-a100"})
    training = read_flags([*FLAGS.split(), "--pipeline-model-parallel-size", "4"])
    alone = search(Evaluator(training, cluster, cluster.links(Path())), 100).rows
    found = search(Evaluator(training, cluster, cluster.links(Path())), 100, error=0.1).rows
    assert sorted(layout_of(row[0].parallel) for row in found) == sorted(layout_of(row[0].parallel) for row in alone)
    assert any(len(row) > 1 for row in found)
    for row in found:
        assert len({layout_of(one.parallel) for one in row}) == 1
        assert len({one.parallel for one in row}) == len(row)
        times = [one.iteration_s for one in row]
        assert max(times) <= 1.1 * min(times)


def found(*layout: str, gpu: str = "a100-80gb", gpus: int = 8) -> tuple[Valued, Evaluator]:
    cluster = Cluster.model_validate({"nodes": 1, "gpus_per_node": gpus, "gpu": gpu, "network": "dgx-a100"})
    training = read_flags([*FLAGS.split(), *layout, "--micro-batch-size", "1"])
    evaluator = Evaluator(training, cluster, cluster.links(Path()))
    return Valued(search(evaluator, 1).proposals[0], 0.0), evaluator


@pytest.mark.parametrize("gpu", ["a100-80gb", "v100-32gb"])  # the latter without flash attention
def test_passes_are_those_of_the_timeline(gpu):
    its, evaluator = found("--pipeline-model-parallel-size", "8", gpu=gpu)
    line = timeline(evaluator.iteration(its.proposal.parallel))
    assert its.proposal.timeline.waits == line.waits
    assert its.proposal.timeline.spans == tuple((row[0], row[-1]) for row in line.spans)  # enough for the picture
    busy_s = sum(span.end_ns - span.start_ns for row in line.spans for span in row) / len(line.spans) / 1e9
    assert parts(its.proposal, evaluator).passes_s == pytest.approx(busy_s)


def test_why_names_what_is_saved():
    """Without stages there are no bubbles; with them there is less to reduce, and less memory."""
    (replicas, given), (stages, _) = (found("--pipeline-model-parallel-size", size) for size in ("1", "8"))
    one, other = (parts(its.proposal, given) for its in (replicas, stages))
    assert one.bubbles_s == 0 < other.bubbles_s
    assert sum((other.passes_s, other.bubbles_s, other.step_s)) == pytest.approx(stages.proposal.iteration_s)
    assert min(one.step_s, other.step_s) >= 0
    said = why(replicas, stages, given)
    assert f"bubbles -{other.bubbles_s * 1e3:.4g} ms" in said
    assert "GiB" in said
    assert why(stages, stages, given) == "no difference"


def test_why_compares_gpu_seconds_of_different_numbers_of_gpus():
    (many, given), (few, _) = (found("--pipeline-model-parallel-size", "1", gpus=gpus) for gpus in (8, 4))
    one, other = (parts(its.proposal, given) for its in (many, few))
    assert one.passes_s < 0.6 * other.passes_s
    said = why(many, few, given, by_time=False)
    assert said.startswith("8 GPUs instead of 4, ")
    assert f"communication and step {8 * one.step_s - 4 * other.step_s:+.4g} GPU-s" in said
    assert "ms" not in said
    assert "passes" not in said  # twice as many take half the time
