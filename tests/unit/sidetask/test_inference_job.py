from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.inference import BatchInferenceJob
from tests.support.drive import begin, drive, finish
from tests.unit.sidetask.test_training_job import points

pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra models")
ARGS: dict[str, Any] = {
    "model": "tests.unit.sidetask.test_inference_job:net",
    "data": "tests.unit.sidetask.test_training_job:points",
    "batch_sizes": [4],
    "pieces": 2,
    "part_rows": 3,
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))


def read(directory):
    rows = pq.read_table(directory / "output.parquet").to_pydict()
    return rows["index"], np.array(rows["output"], dtype=np.float32)


def test_its_rows_are_the_models_outputs(tmp_path):
    task = drive(BatchInferenceJob, tmp_path, **ARGS)
    index, output = read(tmp_path)
    inputs = torch.stack([x for x, _ in points()])
    assert index == list(range(10))
    np.testing.assert_allclose(output, task.model(inputs).detach().numpy(), rtol=1e-6, atol=1e-6)
    assert task.split == "module boundaries, 2 pieces"
    assert [path.name for path in tmp_path.glob("output*")] == ["output.parquet"]


def test_interrupted_anywhere_no_row_is_lost_or_doubled(tmp_path):
    drive(BatchInferenceJob, tmp_path / "whole", **ARGS)
    for steps in range(14):
        directory = tmp_path / str(steps)
        machine = begin(BatchInferenceJob, directory, **ARGS)
        for _ in range(steps):
            try:
                machine.run_next_step()
            except StopIteration:
                break
        state = machine.state_dict()
        finish(machine)  # what ran after the checkpoint, up to the very end, does no harm
        finish(begin(BatchInferenceJob, directory, state, **ARGS))
        assert read(directory)[0] == list(range(10))
        assert np.array_equal(read(directory)[1], read(tmp_path / "whole")[1])


def test_killed_while_the_parts_are_removed_it_is_complete(tmp_path, monkeypatch):
    def killed(folder: Path, **_: Any) -> None:
        next(folder.iterdir()).unlink(missing_ok=True)
        raise KeyboardInterrupt

    machine = begin(BatchInferenceJob, tmp_path, **ARGS)
    for _ in range(9):  # three batches, of which three parts are full
        machine.run_next_step()
    state = machine.state_dict()
    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        finish(machine)
    monkeypatch.undo()
    finish(begin(BatchInferenceJob, tmp_path, state, **ARGS))
    assert read(tmp_path)[0] == list(range(10))
    assert [path.name for path in tmp_path.glob("output*")] == ["output.parquet"]


class Mixed(BatchInferenceJob):
    def write(self, outputs: Any, indices: list[int]) -> None:
        numbers = [at if at < 3 else at / 2 for at in indices]
        self._file.add({"number": numbers, "name": [None if at < 3 else "x" for at in indices]})


def test_a_column_may_be_empty_or_whole_numbers_in_one_part(tmp_path):
    drive(Mixed, tmp_path, **ARGS)
    rows = pq.read_table(tmp_path / "output.parquet").to_pydict()
    assert rows == {"number": [0, 1, 2, *(at / 2 for at in range(3, 10))], "name": [None] * 3 + ["x"] * 7}


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        found = self.layer(x)
        if self.kind == "numbers":
            return found.sum(1)
        return found.T if self.kind == "turned" else {"text": "none"}


def test_an_output_may_be_a_number_for_each_sample(tmp_path):
    args = ARGS | {"model": "tests.unit.sidetask.test_inference_job:Odd", "model_args": {"kind": "numbers"}}
    task = drive(BatchInferenceJob, tmp_path, **args, split="whole")
    expected = task.model(torch.stack([x for x, _ in points()])).detach().numpy()
    np.testing.assert_allclose(read(tmp_path)[1][:, 0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("turned", r"output is of shape \(3, 4\): expected a row for each of 4 samples"),
        ("nothing", "output is a dict without a tensor"),
    ],
)
def test_an_output_without_a_row_for_each_sample_is_refused(tmp_path, kind, message):
    args = ARGS | {"model": "tests.unit.sidetask.test_inference_job:Odd", "model_args": {"kind": kind}}
    with pytest.raises(TaskError, match=message):
        drive(BatchInferenceJob, tmp_path, **args, split="whole")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"batch_sizes": [0]}, "batch_sizes is 0: expected a whole number"),
        ({"batch_sizes": []}, r"batch_sizes is \[\]: expected at least one"),
        ({"part_rows": 0}, "part_rows is 0: expected"),
        ({"data_args": {"count": 0}}, "data has 0 samples"),
        ({"model": "nothing:here"}, "model is 'nothing:here': No module named 'nothing'"),
    ],
)
def test_wrong_arguments(tmp_path, args, message):
    with pytest.raises(ValueError, match=message):
        begin(BatchInferenceJob, tmp_path, **(ARGS | args))
