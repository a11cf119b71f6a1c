"""Waits outside the pipeline are filled: for the other rank's slow storage in a save, for slow batches, and for a late
replica.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.fill.records.account import read_accounts
from tests.e2e.slow_storage import SAVE_S
from tests.e2e.training import REST_MS, SCRIPT, Trained, train, write_jobs

EVERY, ITERATIONS = 2, 24
NAPS = {"name": "a", "task": "tasks:Naps"}, {"name": "b", "task": "tasks:Naps"}
SLOW = ("-m", "pipefill_patches", "tests/e2e/slow_storage.py", SCRIPT)
SLOWLY = "--num-workers 0 --global-batch-size 8"  # many samples, which slow_storage.py makes late, in each iteration
FLAGS = f"--save {{folder}}/model --save-interval {EVERY} --ckpt-format torch {SLOWLY}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder: Path = tmp_path_factory.mktemp("slow")
    jobs = write_jobs(folder, *NAPS)
    return train(folder, f"{FLAGS} {jobs} --fill-max-slowdown 0", ITERATIONS, script=SLOW, rest_ms=REST_MS)


def outside(trained: Trained, rank: int) -> dict[str, Any]:
    return trained.report["ranks"][rank]["outside"]


def test_a_save_that_waits_for_the_other_rank_is_filled(trained):
    save = outside(trained, 0)["save"]
    assert save["total_s"] > 0.9 * ITERATIONS / EVERY * SAVE_S
    assert save["fillable_s"] >= save["harvested_s"] > 0


def test_the_rank_that_writes_has_little_to_fill(trained):
    assert outside(trained, 1).get("save", {"total_s": 0.0})["total_s"] < 0.2 * outside(trained, 0)["save"]["total_s"]


def test_the_rank_that_writes_was_late(trained):
    (save,) = (late for late in trained.report["late"] if late["wait"] == "save")
    assert (save["ranks"], save["others"]) == ([1], 1)
    assert 0 < save["late_s"] <= outside(trained, 0)["save"]["total_s"]


def test_slow_batches_are_filled(trained):
    for rank in (0, 1):
        data = outside(trained, rank)["data"]
        assert data["fillable_s"] >= data["harvested_s"] > 0


def test_waits_for_a_late_replica_are_filled_and_the_losses_stay(tmp_path):
    with_jobs, without = tmp_path / "with", tmp_path / "without"
    flags, found = f"--pipeline-model-parallel-size 1 {SLOWLY}", []
    for folder in (with_jobs, without):
        folder.mkdir()
        jobs = f"{write_jobs(folder, *NAPS)} --fill-max-slowdown 0" if folder is with_jobs else ""
        found.append(train(folder, f"{flags} {jobs}", 14, script=SLOW, rest_ms=REST_MS if jobs else 0))
    waits = outside(found[0], 0)["group"]
    assert waits["fillable_s"] >= waits["harvested_s"] > 0
    assert outside(found[0], 1).get("group", {"total_s": 0.0})["total_s"] < 0.3 * waits["total_s"]
    assert found[0].losses == found[1].losses != {}


def test_all_time_has_its_name(trained):
    """The training loop and all in it have names, however long they take: only what comes after it has none."""
    accounts = read_accounts(trained.folder / "run" / "records" / "1")
    assert len(accounts) == 2
    for account in accounts:
        assert sum(spent.ns for spent in account.spent.values()) == account.wall_ns
        assert account.spent["unnamed"].count < ITERATIONS / 4


def test_the_losses_are_those_of_a_training_without_jobs(trained, tmp_path):
    assert trained.losses == train(tmp_path, FLAGS, ITERATIONS, script=SLOW).losses
