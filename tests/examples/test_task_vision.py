"""Training of image classifiers in steps: FreeRide's ResNet18, ResNet50 and VGG19, small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from examples.tasks.vision import ImageTraining
from megatron.fill.sidetask.models import build_model
from megatron.fill.worker import checkpoint
from tests.support.drive import begin, drive, finish, task_of
from tests.support.extras import needs

needs("timm", "models")
TINY: dict[str, Any] = {"model_args": {"size": "tiny"}, "data_args": {"samples": 10}, "batch_size": 4}


def images(count: int) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 32, 32, generator=generator), at % 10) for at in range(count)]


def weights(task: ImageTraining) -> list[torch.Tensor]:
    return list(task.model.state_dict().values())


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vgg19"])
def test_it_trains_freerides_models(tmp_path, name):
    machine = begin(ImageTraining, tmp_path, model=name, **TINY, updates=5)
    work = finish(machine)
    assert [done for done in work if done] == [4, 4, 2, 4, 4]
    assert sum(work) == machine.task.context.total_work == 18
    result = machine.task.context.result
    assert (result["epoch"], result["updates"]) == (1, 5)
    assert result["loss"] > 0


def test_it_learns_what_a_plain_loop_learns(tmp_path):
    task = drive(
        ImageTraining,
        tmp_path,
        **TINY | {"data": "tests.examples.test_task_vision:images", "data_args": {"count": 8}, "batch_size": 8},
        updates=3,
        seed=7,
    )
    torch.manual_seed(7)
    model = build_model("resnet18", "tiny").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, classes = torch.stack([image for image, _ in images(8)]), torch.tensor([at for _, at in images(8)])
    losses = []
    for epoch in range(3):
        order = list(task._samples.order(7, epoch))
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[order]), classes[order])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for mine, expected in zip(weights(task), model.state_dict().values(), strict=True):
        assert torch.allclose(mine.float(), expected.float(), atol=1e-6)
    assert task.context.result["loss"] == pytest.approx(losses[-1], rel=1e-5)


def test_an_updates_passes_are_steps_of_their_own(tmp_path):
    machine = begin(ImageTraining, tmp_path, **TINY, micro_batch=2, updates=2)
    kinds, work = [], []
    for _ in range(6):
        kinds.append(machine.task.next_node)
        work.append(machine.run_next_step())
    assert kinds == [0, 0, 1, 0, 0, 1]
    assert work == [0, 0, 4, 0, 0, 4]
    with pytest.raises(StopIteration):
        machine.run_next_step()


def test_without_batchnorm_micro_batches_change_nothing(tmp_path):
    args = {**TINY, "model": "vgg19", "data_args": {"samples": 7}, "updates": 2}  # a whole batch, and what is left
    whole, parts = (drive(ImageTraining, tmp_path, **args, micro_batch=micro) for micro in (4, 1))
    for one, other in zip(weights(whole), weights(parts), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


UPDATES: dict[str, Any] = {**TINY, "micro_batch": 2, "updates": 7}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ImageTraining:
    """All updates without an interruption."""
    return drive(ImageTraining, tmp_path_factory.mktemp("whole"), **UPDATES)


@pytest.mark.parametrize("stride", [1, 2, 5])
def test_it_resumes_exactly(tmp_path: Path, whole: ImageTraining, stride: int):
    directory, state, done, work = tmp_path / "parts", None, False, 0.0
    while not done:
        machine = begin(ImageTraining, directory, state, **UPDATES)
        try:
            for _ in range(3 + stride):  # at least one update
                work += machine.run_next_step()
        except StopIteration:
            done = True
        checkpoint.save(directory, machine.state_dict() or {})
        machine.stop()
        state = checkpoint.load(directory)
    assert work == whole.context.total_work
    assert all(
        torch.equal(one, other)
        for one, other in zip(weights(whole), weights(task_of(machine, type(whole))), strict=True)
    )
    assert machine.task.context.result == whole.context.result


def test_without_updates_it_goes_on(tmp_path):
    machine = begin(ImageTraining, tmp_path, **TINY)
    assert sum(machine.run_next_step() for _ in range(60)) >= 60
    assert machine.task.context.total_work is None
    assert machine.task.context.result["epoch"] >= 6


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: expected a whole number of at least 1"),
        ({"micro_batch": 5}, "micro_batch is 5: expected at most batch_size, which is 4"),
        ({"updates": 0}, "updates is 0: expected a whole number of at least 1"),
        ({"learning_rate": 0}, "learning_rate is 0: expected a number above 0"),
        ({"model": "resnet19"}, "model is 'resnet19': expected module:factory or one of efficientnet-b4"),
        ({"model": "bert-base"}, "model is 'bert-base': expected an image model"),
        ({"model_args": {"size": "tiny", "colour": 1}}, "model_args of resnet18: "),
        ({"data": "nowhere"}, "data is 'nowhere': expected module:name"),
    ],
)
def test_wrong_arguments(tmp_path, args, message):
    with pytest.raises(ValueError, match=message):
        begin(ImageTraining, tmp_path, **TINY | args)
