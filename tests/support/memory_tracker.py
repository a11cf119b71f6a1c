"""Which storages a process holds while it runs under torch's fake tensors, and how many bytes they are at most.

A fake tensor has a shape and a storage of that size, but no memory.  The tracker sees every result of every operator,
counts its storage once, and forgets it when the last tensor with it is gone.  What of Megatron cannot run under fake
tensors is replaced by ``stand_in``.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
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


def stand_in() -> None:
    """Replace what needs the values of tensors, and what fake tensors or fake groups cannot do."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import experts, moe_utils, token_dispatcher

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(input, p, True)[0] if training and p else input  # one kernel, as on a GPU

    def rms_norm(input: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        return torch.nn.functional.layer_norm(input, shape, weight, None, eps or 1e-5)  # keeps its input, as a GPU's

    def apply(self: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
        for child in self.children():
            apply(child, function)
        with torch.no_grad():
            for its in self._parameters.values():
                if its is not None:
                    its.data = function(its)  # torch swaps fake parameters, which the tracker's references forbid
            for name, its in self._buffers.items():
                self._buffers[name] = None if its is None else function(its)
        return self

    def gather_objects(found: list[Any], its: Any, group: Any = None) -> None:
        found[:] = [its] * len(found)

    mixed = optimizer.MixedPrecisionOptimizer
    unscale = mixed._unscale_main_grads_and_check_for_nan

    def all_finite(self: Any) -> bool:
        unscale(self)
        return False  # or the step would be skipped

    changes: tuple[tuple[Any, str, Any], ...] = (
        (mixed, "_unscale_main_grads_and_check_for_nan", all_finite),
        (torch.nn.functional, "dropout", dropout),
        (torch.nn.functional, "rms_norm", rms_norm),
        (torch.nn.Module, "_apply", apply),
        (torch.distributed, "all_gather_object", gather_objects),
        (param_and_grad_buffer, "_coalescing_manager", lambda *_args, **_kwargs: contextlib.nullcontext()),
        (optimizer, "get_grad_norm_fp32", lambda *_args, **_kwargs: 1.0),
        (random.CudaRNGStatesTracker, "fork", lambda *_args, **_kwargs: contextlib.nullcontext()),
        (random, "_get_all_rng_states", lambda: ()),
        (random, "_set_all_rng_states", lambda *_states: None),
        (random.CheckpointFunction, "backward", staticmethod(_ending(random.CheckpointFunction.backward))),
        (experts.SequentialMLP, "forward", _balanced(experts.SequentialMLP.forward)),
        (moe_utils.MoEAuxLossAutoScaler, "set_loss_scale", staticmethod(lambda _scale: None)),
        (token_dispatcher, "permute", _permuted(token_dispatcher.permute)),
    )
    for holder, name, its in changes:
        setattr(holder, name, its)


def _ending(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's recomputation, which runs itself again without end where a module returns its own weight.

    A dense MLP with biases does: it leaves its last bias to the layer, and torch makes that the recomputation's result.
    """
    running: set[int] = set()

    def run(its: Any, *gradients: Any) -> Any:
        if id(its) in running:
            raise RuntimeError("the recomputation of a module that returns its bias never ends; expected no bias")
        running.add(id(its))
        try:
            return backward(its, *gradients)
        finally:
            running.remove(id(its))

    return run


def _balanced(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, tokens: Any, _per_expert: Any, probabilities: Any) -> Any:
        each = tokens.shape[0] // self.num_local_experts
        return forward(self, tokens, SimpleNamespace(tolist=lambda: [each] * self.num_local_experts), probabilities)

    return run


def _permuted(permute: Callable[..., Any]) -> Callable[..., Any]:
    def run(tokens: Any, routing_map: Any, *args: Any, **kwargs: Any) -> Any:
        return permute(tokens, routing_map, *args, **{**kwargs, "num_out_tokens": routed(routing_map.shape)})

    return run


def routed(shape: Sequence[int]) -> int:
    """How many of a map's places, tokens by experts, a balanced router chooses."""
    from megatron.training import get_args

    its = get_args()
    return shape[0] * shape[1] * its.moe_router_topk // its.num_experts
