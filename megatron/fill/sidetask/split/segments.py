"""A model as a sequence of segments, the common result of the three ways of splitting.

Values between segments have numbers: the model's flat inputs are ``0 .. n-1``, the others follow.  A value may be used
by any later segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.utils import _pytree as pytree

# The estimated cost of an operation: floating-point operations and bytes moved at nominal rates.
_CALL_NS = 3000.0  # time of an operation that does nothing
# Operations and bytes per nanosecond: one core of a server, and a large accelerator.  Only their ratio matters.
_RATES = {"cpu": (50.0, 10.0), "cuda": (50_000.0, 2000.0)}


class SplitError(Exception):
    """A model cannot be split in this way; the message has the reason."""


@dataclass(frozen=True, slots=True)
class ModelSegment:
    """A piece of a model: ``run`` takes the values with the numbers ``inputs``, and returns those of ``outputs``."""

    run: Callable[..., tuple[Any, ...]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: tuple[torch.Tensor, ...] = ()
    buffers: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Split:
    """A model, split for inputs of certain shapes."""

    how: str  # the way of splitting, for people
    segments: tuple[ModelSegment, ...]
    outputs: tuple[int, ...]  # numbers of the values that make up the model's flat output
    spec: Any  # structure that turns the flat output into the model's output
    differentiable: frozenset[int] = frozenset()  # values that a gradient can reach, found by a run of the segments

    def dead_after(self) -> list[tuple[int, ...]]:
        """For each segment, the values that no later one uses."""
        last: dict[int, int] = {}
        for index, segment in enumerate(self.segments):
            last |= dict.fromkeys((*segment.inputs, *segment.outputs), index)
        for value in self.outputs:
            last.pop(value, None)
        return [tuple(v for v, at in last.items() if at == index) for index in range(len(self.segments))]


class Call:
    """A call of a model with a batch of inputs: a tensor, a mapping of keywords, or a sequence of arguments."""

    def __init__(self, inputs: Any) -> None:
        if isinstance(inputs, dict):
            self.leaves, self.spec = pytree.tree_flatten(((), dict(inputs)))
        elif isinstance(inputs, list | tuple):
            self.leaves, self.spec = pytree.tree_flatten((tuple(inputs), {}))
        else:
            self.leaves, self.spec = pytree.tree_flatten(((inputs,), {}))

    def __call__(self, model: torch.nn.Module, leaves: Iterable[Any] | None = None) -> Any:
        args, kwargs = pytree.tree_unflatten(list(self.leaves if leaves is None else leaves), self.spec)
        return model(*args, **kwargs)

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for inputs that can share a split."""
        shapes = tuple((tuple(x.shape), str(x.dtype)) if isinstance(x, torch.Tensor) else repr(x) for x in self.leaves)
        return (str(self.spec), *shapes)


def even_cuts(costs: list[float], allowed: dict[int, float], pieces: int) -> list[int]:
    """The places, in order, to cut a sequence of operations into at most ``pieces`` of about equal cost.

    ``allowed`` has the places where a cut may be, each the index of the operation after it, with the bytes alive there.
    Around each even place, the one with the fewest bytes is taken.
    """
    ends = list(accumulate(costs, initial=0.0))
    share = ends[-1] / pieces
    cuts: list[int] = []
    for number in range(1, pieces):
        ideal = number * share
        later = [at for at in allowed if at > (cuts[-1] if cuts else 0)]
        if not later:
            break
        near = [at for at in later if abs(ends[at] - ideal) <= share / 4]
        if near:
            cuts.append(min(near, key=lambda at: (allowed[at], abs(ends[at] - ideal), at)))
            continue
        closest = min(later, key=lambda at: (abs(ends[at] - ideal), at))
        if abs(ends[closest] - ideal) <= share:
            cuts.append(closest)
    return cuts


def nbytes(values: Any) -> int:
    """The total size of all tensors in ``values``."""
    return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor))


def cost_ns(flops: float, moved: float, device: str) -> float:
    """The nominal time in ns of ``flops`` operations with ``moved`` bytes."""
    flop_rate, byte_rate = _RATES.get(device, _RATES["cuda"])
    return _CALL_NS + flops / flop_rate + moved / byte_rate
