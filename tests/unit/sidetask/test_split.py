from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.split import split_model
from megatron.fill.sidetask.split.runner import PieceRunner, Randomness
from megatron.fill.sidetask.split.segments import Call, even_cuts


class Skips(nn.Module):
    """Values that later pieces use, dropout, and writing in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for layer in self.layers:
            x = x + nn.functional.dropout(torch.relu_(layer(x)), 0.3, self.training)
            x += 0.5 * first
        return self.norm(x)


class Branches(nn.Module):
    """Depends on a value: cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


def sequential() -> nn.Module:
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.5))
    return nn.Sequential(inner, nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))


def make(factory):
    torch.manual_seed(1)
    return factory(), torch.randn(4, 8)


def whole(model, x):
    with Randomness("cpu", 5):
        loss = model(x).square().mean()
        loss.backward()
    return loss.item(), state(model)


def state(model):
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return gradients | {name: b.clone() for name, b in model.named_buffers()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("factory", "how"),
    [
        (sequential, "module boundaries, 3 pieces"),
        (Skips, "torch.export, 3 pieces"),
        (Branches, "whole steps: torch.export failed: "),
    ],
)
def test_pieces_learn_what_the_whole_learns_bit_for_bit(factory, how, checkpointing):
    model, x = make(factory)
    expected_loss, expected = whole(model, x)
    model, x = make(factory)
    before = torch.get_rng_state()
    split = split_model(model, x, pieces=3)
    assert split.how.startswith(how)
    assert all(p.grad is None for p in model.parameters())
    runner = PieceRunner(split, Randomness("cpu", 5), training=True, checkpointing=checkpointing)
    runner.begin(Call(x).leaves)
    for index in range(len(split.segments)):
        runner.forward(index)
        torch.rand(3)  # what others draw in between plays no part
    loss = runner.loss(lambda output: output.square().mean())
    for index in reversed(range(len(split.segments))):
        runner.backward(index)
    assert loss == expected_loss
    found = state(model)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    torch.set_rng_state(before)


def test_splitting_leaves_the_model_and_the_generator_alone():
    model, x = make(Skips)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    split_model(model, x)
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_way_that_was_asked_for_must_work():
    model, x = make(Branches)
    assert split_model(model, x, "whole").how == "whole steps, as asked"
    with pytest.raises(TaskError, match=r"split is 'export': torch.export failed"):
        split_model(model, x, "export")
    with pytest.raises(TaskError, match=r"split is 'sequential': Branches is not an nn.Sequential"):
        split_model(model, x, "sequential")


def test_values_that_nobody_needs_are_freed():
    model, x = make(sequential)
    split = split_model(model.eval(), x, pieces=3)
    runner = PieceRunner(split, Randomness("cpu", 5))
    runner.begin(Call(x).leaves)
    for index in range(3):
        runner.forward(index)
        assert len(runner._values) == 1
    assert torch.equal(runner.output(), model(x))


def test_cuts_are_even_and_prefer_few_bytes():
    costs = [1.0] * 12
    assert even_cuts(costs, dict.fromkeys(range(1, 12), 8.0), 4) == [3, 6, 9]
    assert even_cuts([1.0] * 40, dict.fromkeys(range(1, 40), 8.0) | {11: 1.0}, 4) == [11, 20, 30]
    assert even_cuts(costs, {}, 4) == []
