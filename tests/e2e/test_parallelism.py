"""Trainings that are more than a pipeline: filled, and losses of all iterations as upstream's, to the bit.

``tests/parallelism/check.py`` has more of them, one for each feature.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.training import REST_MS
from tests.parallelism.check import Checked, check
from tests.parallelism.rows import (
    CHUNKS,
    INTERLEAVED,
    MOE,
    OVERLAPPED,
    OVERLAPS,
    SENT,
    SEQUENCE,
    SPLIT,
    TENSOR,
    AtLeast,
    Row,
    Stages,
)

ROWS = {
    "tensor-sequence": Row(
        4,
        f"{TENSOR} --global-batch-size 4 --sequence-parallel --num-layers 3 --decoder-first-pipeline-num-layers 1 "
        "--recompute-granularity selective --swiglu --position-embedding-type rope --group-query-attention "
        "--num-query-groups 2",
        {**SPLIT, **SEQUENCE, "layers": Stages([1], [2]), "calls.recomputed": AtLeast(1), "position_embedding": "rope"},
    ),
    "interleaved-experts-data": Row(
        4,
        f"{INTERLEAVED} {MOE} --moe-token-dispatcher-type alltoall {OVERLAPPED} "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        {**CHUNKS, **SENT, **OVERLAPS, "calls.recomputed": AtLeast(1)},
    ),
}
ITERATIONS = 7  # at least


@pytest.fixture(scope="module", params=ROWS)
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return check(ROWS[request.param], folder, ITERATIONS, REST_MS)


def test_losses_are_identical_to_upstream(checked):
    assert checked.error == ""
    assert checked.iterations >= ITERATIONS
    assert checked.identical


def test_every_rank_has_bubbles_that_are_filled(checked):
    assert 0 < checked.bubble_share < 1
    assert len(checked.steps) == checked.ranks
    assert min(checked.steps) > 0


def test_the_report_knows_the_stages(checked):
    assert checked.stages_right
    assert checked.peers_alike


def test_the_flags_have_effect(checked):
    assert checked.unmet == ()
