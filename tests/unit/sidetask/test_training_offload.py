"""Offloaded training jobs without a GPU: weights carry a tag of where they are, and every piece looks at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fill.profiles import Configuration, Offload
from megatron.fill.sidetask import TaskContext, split
from megatron.fill.sidetask.optimizing import Offloaded
from megatron.fill.sidetask.split.segments import ModelSegment
from megatron.fill.sidetask.training import TrainingJob
from megatron.fill.work import Work
from megatron.fill.worker.profiler import measure_nodes

DEVICE = "cpu:0"  # to PyTorch the same as the host, to a job a device
ARGS: dict[str, Any] = {
    "model": "tests.unit.sidetask.test_training_job:net",
    "model_args": {"norm": False},
    "data": "tests.unit.sidetask.test_training_job:points",
    "data_args": {"count": 400},
    "loss": "torch.nn.functional:mse_loss",
    "optimizer": "torch.optim:SGD",
    "optimizer_args": {"lr": 0.1, "momentum": 0.9},
    "epochs": 1,
    "batch_size": 4,
    "pieces": 3,
}


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Where each tensor was moved to last, by its id; pieces that find a weight elsewhere fail as on CUDA."""
    found: dict[int, str] = {}

    def move(parameters: Sequence[Any], device: str) -> None:
        found.update({id(parameter): device for parameter in parameters})

    def check(parameters: Sequence[Any]) -> None:
        if any(found.get(id(parameter), DEVICE) != DEVICE for parameter in parameters):
            raise RuntimeError("Expected all tensors to be on the same device")

    def checked(segment: ModelSegment) -> ModelSegment:
        def run(*inputs: Any) -> Any:
            check(segment.parameters)
            return segment.run(*inputs)

        return replace(segment, run=run)

    def split_model(model: Any, *args: Any) -> split.Split:
        check(list(model.parameters()))
        made = real(model, *args)
        return replace(made, segments=tuple(map(checked, made.segments)))

    real = split.split_model
    monkeypatch.setattr(split, "split_model", split_model)
    monkeypatch.setattr(Offloaded, "_move", staticmethod(move))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def test_every_configuration_is_measured_one_after_the_other(tmp_path: Path) -> None:
    work = Work("megatron.fill.sidetask.training:TrainingJob", args=ARGS)
    measured = measure_nodes(work, TaskContext("job", tmp_path, DEVICE))
    offered = TrainingJob()
    offered.context = TaskContext("job", tmp_path, DEVICE)
    offered.create(**ARGS)
    assert measured is not None
    profiles = measured.profiles
    assert [profile.configuration for profile in profiles] == offered.configurations()
    assert {profile.configuration.offload for profile in profiles} == set(Offload)


def trained(folder: Path, *configurations: Configuration) -> dict[str, torch.Tensor]:
    """The weights after an epoch in which the configuration changed after some iterations."""
    task = TrainingJob()
    task.context = TaskContext("job", folder, DEVICE)
    task.create(**ARGS)
    task.configure(configurations[0])
    task.init()
    for configuration in configurations[1:]:
        for _ in range(3 * len(task.node_names())):
            task.run_next_step()
        task.configure(configuration)
    for _ in range(10 * len(task.node_names())):
        task.run_next_step()
    return {name: value.clone() for name, value in task.model.state_dict().items()}


def test_a_job_can_change_over_from_offloaded_weights(tmp_path: Path) -> None:
    weights, none = Configuration(4, True, Offload.WEIGHTS), Configuration(4)
    reference = trained(tmp_path, none, none)
    for name, value in trained(tmp_path, weights, none).items():
        assert torch.equal(value, reference[name])


def test_a_batch_of_a_new_shape_is_split_while_the_weights_are_away(tmp_path: Path, places: dict[int, str]) -> None:
    task = TrainingJob()
    task.context = TaskContext("job", tmp_path, DEVICE)
    task.create(**ARGS, split="whole")
    task.configure(Configuration(4, True, Offload.WEIGHTS))
    task.init()
    assert set(places.values()) == {"cpu"}
    task._split_for(torch.zeros(3, 4), prepared=False)
    assert set(places.values()) == {"cpu"}
