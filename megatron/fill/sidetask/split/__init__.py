"""Splitting a model into a sequence of pieces that run one after the other (PipeFill, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.split.export import split_export
from megatron.fill.sidetask.split.runner import PieceRunner, Randomness, restored
from megatron.fill.sidetask.split.segments import Call, ModelSegment, Split, SplitError
from megatron.fill.sidetask.split.sequential import split_sequential

_SEED = 7  # seed of the trial runs


def split_model(
    model: nn.Module,
    inputs: Any,
    way: str = "auto",
    pieces: int = 24,
    aside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Split:
    """Split a model for inputs of these shapes, in its current mode (training or evaluation).

    A way is used only if the pieces give the same outputs as the whole model (on CUDA: nearly the same); the last
    resort is a single piece.  The model's weights and buffers and torch's generators are left unchanged.

    Args:
        inputs: example batch on the model's device.
        way: ``sequential`` (module boundaries), ``export`` (``torch.export``), ``whole``, or ``auto`` for the first of
            them that works.
        pieces: greatest number of pieces.
        aside: context for long work without the device (``TaskContext.aside``).

    Raises:
        TaskError: the requested way does not work.
    """
    call = Call(inputs)
    device = next((str(x.device) for x in call.leaves if isinstance(x, torch.Tensor)), "cpu")
    buffers = list(model.buffers())
    reasons = []
    with restored(buffers), Randomness(device, _SEED):
        with restored(buffers), torch.no_grad(), Randomness(device, _SEED):
            expected, spec = pytree.tree_flatten(call(model))
        for name in ("sequential", "export") if way == "auto" else (way,):
            try:
                if name == "sequential":
                    with torch.no_grad(), restored(buffers):
                        split = split_sequential(model, call, pieces)
                elif name == "export":
                    with restored(buffers), aside():
                        split = split_export(model, call, pieces, spec)
                else:
                    break
                with restored(buffers):
                    return _tried(split, call, expected, device)
            except SplitError as error:
                reasons.append(str(error))
                if way != "auto":
                    raise TaskError(f"split is {way!r}: {error}") from error
        why = "whole steps" + (f": {reasons[-1]}" if reasons else ", as asked")
        return _tried(_whole(model, call, len(expected), spec, why), call, expected, device)


def _whole(model: nn.Module, call: Call, outputs: int, spec: Any, why: str) -> Split:
    first = len(call.leaves)
    numbers = tuple(range(first, first + outputs))
    segment = ModelSegment(
        lambda *leaves: tuple(pytree.tree_leaves(call(model, leaves))),
        tuple(range(first)),
        numbers,
        tuple(model.parameters()),
        tuple(model.buffers()),
    )
    return Split(why, (segment,), numbers, spec)


def _tried(split: Split, call: Call, expected: list[Any], device: str) -> Split:
    """Run the pieces once, and find what a gradient can reach; SplitError if one fails, or the outputs differ."""
    reached: set[int] = set()
    runner = PieceRunner(split, Randomness(device, _SEED))
    values: dict[int, Any] = dict(enumerate(call.leaves))
    for index, segment in enumerate(split.segments):
        inputs = [values[n].detach() if isinstance(values[n], torch.Tensor) else values[n] for n in segment.inputs]
        for number, value in zip(segment.inputs, inputs, strict=True):
            if number in reached:
                value.requires_grad_()
        versions = [getattr(value, "_version", 0) for value in inputs]
        try:
            with runner.randomness, torch.enable_grad():
                outputs = segment.run(*inputs)
        except RuntimeError as error:
            if len(split.segments) == 1:
                raise
            raise SplitError(f"piece {index} failed: {str(error).splitlines()[0]}") from error
        if versions != [getattr(value, "_version", 0) for value in inputs]:
            raise SplitError(f"piece {index} writes into its input")
        for number, output in zip(segment.outputs, outputs, strict=True):
            if isinstance(output, torch.Tensor):
                if output.requires_grad:
                    reached.add(number)
                output = output.detach()
            values[number] = output
    got = [values[number] for number in split.outputs]
    if not all(_same(a, b) for a, b in zip(got, expected, strict=True)) and len(split.segments) > 1:
        raise SplitError(f"{split.how} gave other outputs than the whole model")
    return replace(split, differentiable=frozenset(reached))


def _same(got: Any, expected: Any) -> bool:
    if not isinstance(got, torch.Tensor):
        return bool(got == expected)
    if got.device.type == "cpu":
        return torch.equal(got, expected)
    return torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
