"""Weights that are streamed to a CUDA device: the same outputs, and no more on the device than two pieces."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.fill.sidetask.split import split_model
from megatron.fill.sidetask.split.runner import PieceRunner, Randomness
from megatron.fill.sidetask.split.segments import Call
from megatron.fill.sidetask.split.streaming import Streamed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH, LAYERS, DEVICE = 2048, 12, "cuda:0"


def test_outputs_and_memory():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).eval().to(DEVICE)
    inputs = torch.randn(64, WIDTH, device=DEVICE)
    with torch.no_grad():
        expected = model(inputs)
    split = split_model(model, inputs, "sequential", LAYERS)
    piece_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    streamed = Streamed(model, split, DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        runner = PieceRunner(split, Randomness(DEVICE, 0), resident=streamed)
        runner.begin(Call(inputs).leaves)
        for index in range(len(split.segments)):
            runner.forward(index)
            torch.cuda.synchronize()  # as between two steps
        assert torch.equal(runner.output(), expected)
    assert all(parameter.device.type == "cpu" and parameter.is_pinned() for parameter in model.parameters())
    # Two pieces' weights, what passes between them, and the allocator's rounding; all of them are 12 pieces.
    assert torch.cuda.max_memory_allocated() - before < 3 * piece_bytes
    streamed.end()
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)
