"""Checkpoints that a process beside each rank writes: all of them complete, and the training goes on and ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from tests.e2e.training import Trained, train, write_jobs

EVERY, ITERATIONS = 3, 6
FLAGS = f"--async-save --use-persistent-ckpt-worker --async-strategy mcore --save-interval {EVERY}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder: Path = tmp_path_factory.mktemp("saving")
    jobs = write_jobs(folder, {"name": "a", "task": "tasks:Spin"})
    return train(folder, f"--save {folder}/model {FLAGS} {jobs}", ITERATIONS)


def weights(trained: Trained, iteration: int) -> torch.Tensor:
    """The first layer's in the checkpoint of this iteration."""
    reader = FileSystemReader(trained.folder / "model" / f"iter_{iteration:07d}")
    name, entry = next(
        item for item in reader.read_metadata().state_dict_metadata.items() if "linear_qkv.weight" in item[0]
    )
    found = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    load(found, storage_reader=reader, no_dist=True)
    return found[name]


def test_every_checkpoint_is_complete(trained):
    model = trained.folder / "model"
    assert sorted(folder.name for folder in model.glob("iter_*")) == ["iter_0000003", "iter_0000006"]
    assert (model / "latest_checkpointed_iteration.txt").read_text() == str(ITERATIONS)
    assert not torch.equal(weights(trained, EVERY), weights(trained, ITERATIONS))


def test_the_training_ends_as_always(trained):
    assert len(trained.losses) == ITERATIONS
    assert [rank["iterations"] for rank in trained.report["ranks"]] == [ITERATIONS, ITERATIONS]
