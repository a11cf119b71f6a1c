from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from megatron.fill.errors import TaskError
from megatron.fill.profiles import Configuration
from megatron.fill.sidetask import TaskContext
from megatron.fill.sidetask.training import TrainingJob

MODEL = {"model": "tests.unit.sidetask.test_training_job:net", "data": "tests.unit.sidetask.test_training_job:points"}
ARGS: dict[str, Any] = {
    **MODEL,
    "loss": "torch.nn.functional:mse_loss",
    "epochs": 2,
    "batch_size": 4,
    "pieces": 3,
    "seed": 3,
}


def net(norm: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def points(count: int = 10, ends: int | None = None) -> list:
    generator = torch.Generator().manual_seed(0)
    made = [(x, x.sum(0, keepdim=True)) for x in torch.randn(count, 4, generator=generator)]
    return made if ends is None else Short(made, ends)


class Short(list):
    def __init__(self, made: list, ends: int) -> None:
        super().__init__(made[:ends])
        self.claimed = len(made)

    def __len__(self) -> int:
        return self.claimed


class Stream:
    def __iter__(self):
        return iter(points(10))


def begin(directory, state=None, configuration=None, **changed):
    directory.mkdir(exist_ok=True)
    task = TrainingJob()
    task.context = TaskContext("x", directory)
    task.create(**(ARGS | changed))
    if state is not None:
        task.load_state_dict(state)
    if configuration is not None:
        task.configure(Configuration.parse(configuration))
    task.init()
    return task


def run(directory, state=None, nodes=None, configuration=None, **changed):
    task = begin(directory, state, configuration, **changed)
    work: list[float] = []
    while nodes is None or len(work) < nodes:
        try:
            work.append(task.run_next_step())
        except StopIteration:
            break
    return task, work


def assert_same(one, other):
    values = other.model.state_dict()
    assert [name for name, value in one.model.state_dict().items() if not torch.equal(value, values[name])] == []


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_it_is_the_plain_loop_bit_for_bit(tmp_path, optimizer):
    task, work = run(tmp_path, model_args={"norm": False}, optimizer=f"torch.optim:{optimizer}")
    whole, _ = run(tmp_path, model_args={"norm": False}, optimizer=f"torch.optim:{optimizer}", split="whole", pieces=1)
    assert_same(task, whole)
    assert sum(work) == task.context.total_work == 20
    assert task.context.result["epoch"] == 2
    assert task.split == "module boundaries, 3 pieces"
    assert len(task.node_names()) == len(set(task.node_names())) == 3 + 1 + 3 + 3


@pytest.mark.parametrize(
    "source", ["tests.unit.sidetask.test_training_job:points", "tests.unit.sidetask.test_training_job:Stream"]
)
def test_a_checkpoint_at_every_node_goes_on_bit_for_bit(tmp_path, source):
    whole, work = run(tmp_path / "whole", data=source)
    before = begin(tmp_path / "before", data=source)
    for steps in range(len(work) + 1):
        state = copy.deepcopy(before.state_dict())
        after, rest = run(tmp_path / "after", state, data=source)
        assert sum(work[:steps]) + sum(rest) == 20
        assert_same(after, whole)
        assert after.context.result == whole.context.result
        if steps < len(work):
            assert before.run_next_step() == work[steps]
    assert_same(before, whole)  # to be saved at each node changes nothing


def test_no_configuration_changes_what_is_learnt(tmp_path):
    args = {"model": "torch.nn:Linear", "model_args": {"in_features": 4, "out_features": 1}}
    whole, _ = run(tmp_path, **args)
    for name in ("b4+checkpointing", "b2", "b1+checkpointing"):
        task, work = run(tmp_path, configuration=name, **args)
        assert sum(work) == 20
        for got, expected in zip(task.model.parameters(), whole.model.parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)  # sums in another order


def test_checkpointing_updates_statistics_once_and_keeps_masks(tmp_path):
    assert_same(run(tmp_path)[0], run(tmp_path, configuration="b4+checkpointing")[0])


def test_batch_norm_needs_the_whole_batch(tmp_path):
    task, _ = run(tmp_path, nodes=0)
    assert [str(c) for c in task.configurations()] == ["b4", "b4+checkpointing"]
    with pytest.raises(TaskError, match=r"configuration is b2: expected one of b4, b4\+checkpointing"):
        task.configure(Configuration(2))


def test_data_that_ends_early(tmp_path):
    with pytest.raises(TaskError, match=r"data ended early: no sample [6-9], although its length is 10"):
        run(tmp_path, data_args={"ends": 6})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: expected"),
        ({"micro_batch_sizes": [3]}, r"micro_batch_sizes is \[3\]: expected divisors of batch_size 4; 3 is not"),
        ({"model": "bert-huge"}, "model is 'bert-huge': expected module:factory or one of efficientnet-b4"),
        ({"data_args": {"count": 0}}, "data has 0 samples: expected at least 1"),
        ({"steps": 3}, "epochs is 2 and steps is 3: expected one of the two"),
        ({"loss": None}, "loss is None: expected module:function"),
        ({"optimizer": "torch.optim:LBFGS"}, "optimizer is 'torch.optim:LBFGS': it needs a closure"),
        ({"optimizer": "torch.optim:Nothing"}, "optimizer is 'torch.optim:Nothing': "),
        ({"split": "pieces"}, "split is 'pieces': expected one of auto"),
    ],
)
def test_wrong_arguments(tmp_path, args, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **args)
