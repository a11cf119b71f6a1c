"""Ranks of configurations with ties, and the reason why one comes before another."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.flags import Training, read_flags
from megatron.fill.wings.configure.ranked import ERROR, parts, ranks, why
from megatron.fill.wings.configure.search import search
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


def test_of_experts_ties_that_leave_room_and_share_experts_out_in_a_node_come_first():
    fields = {"nodes": 2, "gpus_per_node": 4, "gpu": "a100-40gb", "memory": "12GiB", "network": "dgx-a100"}
    cluster = Cluster.model_validate(fields)
    experts = "--num-experts 16 --moe-router-topk 2 --moe-grouped-gemm --sequence-parallel --seq-length 4096"
    training = read_flags([*FLAGS.split(), *experts.split()])
    by_time, safest = (search(training, cluster, cluster.links(Path()), 400, error=its).proposals for its in (0.0, 0.3))
    times = [one.iteration_s for one in by_time]
    assert times == sorted(times)
    ties = sum(its <= 1.3 * times[0] for its in times)
    assert safest[ties:] == by_time[ties:]
    keys = [(one.peak_bytes > 0.9 * one.room_bytes, -min(one.parallel.ep, 4), one.iteration_s) for one in safest[:ties]]
    assert keys == sorted(keys)
    assert len({key[:2] for key in keys}) > 3  # some leave room and some do not
    assert search(training, cluster, cluster.links(Path()), 2, error=0.3).proposals == safest[:2]


def found(*layout: str) -> tuple[Valued, tuple[Training, Cluster, None]]:
    cluster = Cluster.model_validate({"nodes": 1, "gpus_per_node": 8, "gpu": "a100-80gb", "network": "dgx-a100"})
    training = read_flags([*FLAGS.split(), *layout, "--micro-batch-size", "1"])
    return Valued(search(training, cluster, cluster.links(Path()), 1).proposals[0], 0.0), (training, cluster, None)


def test_why_names_what_is_saved():
    """Without stages there are no bubbles; with them there is less to reduce, and less memory."""
    (replicas, given), (stages, _) = (found("--pipeline-model-parallel-size", size) for size in ("1", "8"))
    one, other = (parts(its.proposal, *given) for its in (replicas, stages))
    assert one.bubbles_s == 0 < other.bubbles_s
    assert sum((other.passes_s, other.bubbles_s, other.step_s)) == pytest.approx(stages.proposal.iteration_s)
    assert min(one.step_s, other.step_s) >= 0
    said = why(replicas, stages, *given)
    assert f"bubbles -{other.bubbles_s * 1e3:,.4g} ms" in said
    assert "GiB" in said
    assert why(stages, stages, *given) == "no difference"
