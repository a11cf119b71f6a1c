"""What Megatron's own functions are replaced by, so that ``memory_truth`` can run them under fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


def stand_in() -> None:
    """For what needs the values of tensors, and for what fake tensors or fake groups cannot do."""
    import torch
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import experts, moe_utils, token_dispatcher

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(input, p, True)[0] if training and p else input  # one kernel, as on a GPU

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
