"""Which storages a process holds while it runs under torch's fake tensors, and how many bytes they are at most.

A fake tensor has a shape and a storage of that size, but no memory.  The tracker sees every result of every operator,
counts its storage once, and forgets it when the last tensor with it is gone.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ITEM = torch.ops.aten._local_scalar_dense.default
_SELECT = torch.ops.aten.masked_select.default


class StorageTracker(TorchDispatchMode):
    """Counts storages; enter it inside of a ``FakeTensorMode``.

    What an operator cannot know of a fake tensor is assumed: a number that is read is 1 (or False), and of a routing
    map as many tokens are selected as ``selected`` says.

    Attributes:
        now_bytes: of all storages that are held.
        peak_bytes: the most since ``restart``.
        at_peak: by operator, shape and type, what was held then; only with ``detailed``.
        selected: how many elements a mask of this shape selects; None where no routing is expected.
    """

    def __init__(self, selected: Callable[[torch.Size], int] | None = None, detailed: bool = False) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self.at_peak: Counter[str] = Counter()
        self._selected = selected
        self.detailed = detailed
        self._held: dict[int, tuple[int, weakref.ref[Any], str]] = {}
        self._inside: list[weakref.ref[Any]] | None = None

    def restart(self) -> None:
        """Forget the peak, not what is held."""
        self.peak_bytes = self.now_bytes

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is compiled on a GPU: what it returns or keeps for its backward pass counts, no more."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside is not None:
                return function(*args, **kwargs)
            self._inside = []
            try:
                return function(*args, **kwargs)
            finally:
                inside, self._inside = self._inside, None
                for reference in inside:
                    storage = reference()
                    if storage is not None:
                        self._count(storage, "kept by a fused function")

        return run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _ITEM:
            kind = args[0].dtype
            return 1.0 if kind.is_floating_point else kind is not torch.bool and 1
        if func is _SELECT and self._selected is not None:
            out = args[0].new_empty(self._selected(args[1].shape))
        else:
            out = func(*args, **(kwargs or {}))
        for its in tree_leaves(out):
            if isinstance(its, torch.Tensor):
                self._see(its, func)
        return out

    def _see(self, tensor: torch.Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._held:
            return
        if self._inside is not None:
            self._inside.append(weakref.ref(storage))
        else:
            self._count(storage, f"{func} {tuple(tensor.shape)} {tensor.dtype}" if self.detailed else "")

    def _count(self, storage: torch.UntypedStorage, name: str) -> None:
        key = storage._cdata
        if key in self._held:
            return
        self._held[key] = storage.nbytes(), weakref.ref(storage, lambda _: self._forget(key)), name
        self.now_bytes += storage.nbytes()
        if self.now_bytes > self.peak_bytes:
            self.peak_bytes = self.now_bytes
            if self.detailed:
                self.at_peak.clear()
                for size, _, its in self._held.values():
                    self.at_peak[its] += size

    def _forget(self, key: int) -> None:
        self.now_bytes -= self._held.pop(key)[0]
