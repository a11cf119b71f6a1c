"""Weights that come to the device piece by piece: equal outputs, in the order in which pieces run, two at a time."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from megatron.fill.profiles import Configuration, Offload
from megatron.fill.sidetask.inference import BatchInferenceJob
from megatron.fill.sidetask.split import split_model, streaming
from megatron.fill.sidetask.split.runner import PieceRunner, Randomness
from megatron.fill.sidetask.split.segments import Call
from megatron.fill.sidetask.split.streaming import Streamed
from tests.support.drive import begin, drive, finish
from tests.unit.sidetask.test_inference_job import ARGS, pq, read


class Tied(nn.Module):
    """Layers that are one after the other, the first and the last two with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.layers[4] = self.layers[3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x @ self.layers[0].weight


MODELS = {
    "sequential": lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]),
    "export": Tied,
}


def setting(way: str):
    torch.manual_seed(0)
    model = MODELS[way]().eval()
    inputs = torch.randn(3, 6)
    with torch.no_grad():
        expected = model(inputs)
    return model, inputs, expected, split_model(model, inputs, way, 4)


def run(split, inputs, streamed) -> torch.Tensor:
    runner = PieceRunner(split, Randomness("cpu", 0), resident=streamed)
    runner.begin(Call(inputs).leaves)
    for index in range(len(split.segments)):
        runner.forward(index)
    return runner.output()


@pytest.mark.parametrize("way", MODELS)
def test_the_outputs_are_those_of_the_whole_model(way):
    model, inputs, expected, split = setting(way)
    assert len(split.segments) > 2
    before = [parameter.data_ptr() for parameter in model.parameters()]
    streamed = Streamed(model, split, "cpu")
    for _ in range(3):
        assert torch.equal(run(split, inputs, streamed), expected)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before  # between batches: in host memory
    streamed.end()
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)


def test_a_piece_uses_what_was_copied_and_not_what_is_in_host_memory():
    model, inputs, expected, split = setting("sequential")
    streamed = Streamed(model, split, "cpu")
    run(split, inputs, streamed)  # the first piece's weights have come again
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # in host memory, where they are
    there = split.segments[0].parameters
    with streamed(there):
        assert all(parameter.abs().sum() > 0 for parameter in there)
    assert not torch.equal(run(split, inputs, streamed), expected)


def test_the_next_pieces_weights_come_while_one_runs_and_those_of_two_are_there(monkeypatch):
    model, _, _, split = setting("sequential")
    said: list[str] = []
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    pieces = {id(p): number for number, segment in enumerate(split.segments) for p in segment.parameters}
    streamed = Streamed(model, split, "cpu")
    host = {data.data_ptr(): pieces[id(parameter)] for parameter, data in streamed._host.items()}
    copied = streaming._copied

    def copy(data: torch.Tensor, device: torch.device) -> torch.Tensor:
        found = copied(data, device)
        alive.append(weakref.ref(found))
        said.append(f"copy {host[data.data_ptr()]}")
        return found

    monkeypatch.setattr(streaming, "_copied", copy)
    for _ in range(2):
        for index, segment in enumerate(split.segments):
            with streamed(segment.parameters):
                said.append(f"run {index}")
                gc.collect()
                most = max(most, sum(ref() is not None for ref in alive))
    each = len(split.segments[0].parameters)
    assert most == 2 * each
    short = [word for place, word in enumerate(said) if place == 0 or word != said[place - 1]]
    turns = [word for now in range(4) for word in (f"copy {(now + 1) % 4}", f"run {now}")]
    assert short == ["copy 0", *turns, *turns]


def test_a_job_whose_weights_are_streamed_writes_the_same_rows(tmp_path):
    args = ARGS | {"pieces": 3}
    drive(BatchInferenceJob, tmp_path / "there", **args)
    task = drive(BatchInferenceJob, tmp_path / "streamed", **args, offload=["weights"])
    assert task.configurations() == [Configuration(4, False, Offload.WEIGHTS)]
    assert read(tmp_path / "there")[0] == read(tmp_path / "streamed")[0]
    assert np.array_equal(read(tmp_path / "there")[1], read(tmp_path / "streamed")[1])


def test_it_can_change_over_and_back_between_batches(tmp_path):
    drive(BatchInferenceJob, tmp_path / "whole", **ARGS)
    machine = begin(BatchInferenceJob, tmp_path / "changing", **ARGS, offload=["none", "weights"])
    task = machine.task
    assert isinstance(task, BatchInferenceJob)
    for offload in (Offload.WEIGHTS, Offload.NONE):
        task.configure(Configuration(4, False, offload))
        for _ in range(3):  # two pieces, and the writing
            machine.run_next_step()
    task.configure(Configuration(4, False, Offload.WEIGHTS))
    finish(machine)
    assert np.array_equal(read(tmp_path / "changing")[1], read(tmp_path / "whole")[1])


def ragged() -> list[torch.Tensor]:
    """One sample of each length is a batch of a shape of its own."""
    torch.manual_seed(1)
    return [torch.randn(length, 6) for length in (3, 3, 5, 3, 4, 5)]


def sums() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def test_a_shape_that_was_not_prepared_is_split_while_weights_are_streamed(tmp_path):
    args = {
        "model": "tests.unit.sidetask.test_streaming:sums",
        "data": "tests.unit.sidetask.test_streaming:ragged",
        "batch_sizes": [1],
    }
    drive(BatchInferenceJob, tmp_path / "there", **args, split="export")
    drive(BatchInferenceJob, tmp_path / "streamed", **args, split="export", offload=["weights"])
    rows = [pq.read_table(tmp_path / name / "output.parquet").to_pydict() for name in ("there", "streamed")]
    assert rows[0] == rows[1]
    assert len({len(row) for row in rows[0]["output"]}) > 1


@pytest.mark.parametrize("offload", [[], ["optimizer"], ["none", "all"]])
def test_wrong_ways_to_offload(tmp_path, offload):
    with pytest.raises(ValueError, match=r"offload is .*: expected a list of none, weights, or both"):
        drive(BatchInferenceJob, tmp_path, **ARGS, offload=offload)
