"""The estimated cost of an operation: floating-point operations and bytes moved at nominal rates."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

_CALL_NS = 3000.0  # time of an operation that does nothing
# Operations and bytes per nanosecond: one core of a server, and a large accelerator.  Only their ratio matters.
_RATES = {"cpu": (50.0, 10.0), "cuda": (50_000.0, 2000.0)}


def nbytes(values: Any) -> int:
    """The total size of all tensors in ``values``."""
    return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor))


def cost_ns(flops: float, moved: float, device: str) -> float:
    """The nominal time in ns of ``flops`` operations with ``moved`` bytes."""
    flop_rate, byte_rate = _RATES.get(device, _RATES["cuda"])
    return _CALL_NS + flops / flop_rate + moved / byte_rate
