"""Splitting an ``nn.Sequential`` at the boundaries of its modules."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from megatron.fill.sidetask.split.segments import Call, ModelSegment, Split, SplitError, cost_ns, even_cuts, nbytes


def split_sequential(model: nn.Module, call: Call, pieces: int) -> Split:
    """Split an ``nn.Sequential`` into at most ``pieces`` pieces; SplitError unless its modules pass one tensor."""
    if not _is_sequential(model):
        raise SplitError(f"{type(model).__name__} is not an nn.Sequential")
    if len(call.leaves) != 1:
        raise SplitError(f"{len(call.leaves)} inputs; expected one")
    modules = _flatten(model)
    if not modules:
        raise SplitError("the nn.Sequential is empty")
    costs, sizes = _costs(modules, call.leaves[0])
    # A module that writes into its input stays in the same piece as the module before it.
    allowed = {i: sizes[i - 1] for i in range(1, len(modules)) if not _in_place(modules[i])}
    bounds = [0, *even_cuts(costs, allowed, pieces), len(modules)]
    segments = []
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        part = modules[begin:end]
        parameters = tuple(p for m in part for p in m.parameters())
        buffers = tuple(b for m in part for b in m.buffers())
        segments.append(ModelSegment(partial(_through, part), (number,), (number + 1,), parameters, buffers))
    how = f"module boundaries, {len(segments)} pieces"
    return Split(how, tuple(segments), (len(segments),), pytree.tree_structure(0))


def _through(modules: list[nn.Module], value: Any) -> tuple[Any, ...]:
    for module in modules:
        value = module(value)
    return (value,)


def _is_sequential(module: nn.Module) -> bool:
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not hooked


def _flatten(module: nn.Module) -> list[nn.Module]:
    if not _is_sequential(module):
        return [module]
    return [leaf for child in module.children() for leaf in _flatten(child)]


def _in_place(module: nn.Module) -> bool:
    return any(getattr(child, "inplace", False) for child in module.modules())


def _costs(modules: list[nn.Module], value: torch.Tensor) -> tuple[list[float], list[float]]:
    """The nominal cost of each module, and the bytes of its output."""
    costs, sizes = [], []
    device = value.device.type
    for module in modules:
        before = nbytes(value)
        with FlopCounterMode(display=False) as meter:
            value = module(value.detach())
        if not isinstance(value, torch.Tensor):
            raise SplitError(f"{type(module).__name__} returns {type(value).__name__}; expected one tensor")
        moved = before + nbytes(value) + nbytes(list(module.parameters()))
        costs.append(cost_ns(meter.get_total_flops(), moved, device))
        sizes.append(float(nbytes(value)))
    return costs, sizes
