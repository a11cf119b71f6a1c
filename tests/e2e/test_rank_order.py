"""Ranks in another order train the same: each loss to the bit."""

from __future__ import annotations

import json

import pytest

from megatron.fill.records.segment import last_segment
from tests.e2e.training import Trained, train

ORDER = [2, 0, 3, 1]
ITERATIONS = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Two stages with two replicas: in the launcher's order, and in another."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("default", "ordered")}
    path = folders["ordered"] / "order.json"
    path.write_text(json.dumps({"order": ORDER}), encoding="utf-8")
    flags = {"default": "", "ordered": f"--fill-rank-order {path}"}
    profile = "--global-batch-size 8 --fill-profile-only --fill-report {folder}/run"
    return {name: train(folder, f"{profile} {flags[name]}", ITERATIONS, ranks=4) for name, folder in folders.items()}


def test_the_losses_are_those_of_the_default_order(trained):
    losses = trained["ordered"].losses
    assert len(losses) == ITERATIONS
    assert losses == trained["default"].losses


def test_each_rank_is_where_the_order_says(trained):
    places = {name: [record.info.local_rank for record in records(one)] for name, one in trained.items()}
    assert places == {"default": [0, 1, 2, 3], "ordered": ORDER}


def test_the_report_counts_as_megatron_does(trained):
    for one in trained.values():
        assert [(record.info.rank, record.info.stage) for record in records(one)] == [(0, 0), (1, 0), (2, 1), (3, 1)]
        cycle = json.loads((one.folder / "run" / "bubbles.json").read_text(encoding="utf-8"))
        assert [rank["rank"] for rank in cycle["ranks"]] == [0, 1, 2, 3]


def records(one: Trained) -> list:
    return sorted(last_segment(one.folder / "run").records(), key=lambda record: record.info.rank)
