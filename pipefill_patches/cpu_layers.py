"""The Megatron half of the CPU backend: features that its local layers lack (Transformer Engine or Apex has them).

Sequence parallelism needs a layer norm whose weights' gradients are summed over the tensor-parallel ranks, context
parallelism an attention over the keys and values of all ranks, multi-head latent attention an attention with a separate
width of the values, and the all-to-all of the experts' tokens its sizes as numbers on the host.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import torch

from pipefill_patches.patch import Call, Target, around, replace

_NORM = Target("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", ("cls", "config", "hidden_size"))
_ATTENTION_INIT = Target(
    "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__", ("self", "config")
)
_ATTENTION = Target(
    "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
    ("self", "query", "key", "value", "attention_mask"),
)
_GATHER = Target("megatron.core.tensor_parallel.mappings:gather_from_sequence_parallel_region", ("input_",))
_MOVE = Target(
    "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu", ("tensor", "as_numpy", "record_stream")
)
TARGETS = (_NORM, _ATTENTION_INIT, _ATTENTION, _GATHER, _MOVE)


def install(stack: contextlib.ExitStack) -> None:
    _sequence_parallel_norm(stack)
    around(stack, *_ATTENTION_INIT.resolve(), _any_width)
    around(stack, *_ATTENTION.resolve(), _attention_to_all)
    around(stack, *_MOVE.resolve(), _token_counts_on_host)


def _sequence_parallel_norm(stack: contextlib.ExitStack) -> None:
    owner, name = _NORM.resolve()
    make = owner.__new__

    @functools.wraps(make)
    def norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        made = make(cls, plain, *args, **kwargs)
        for weight in made.parameters():
            weight.sequence_parallel = config.sequence_parallel  # Megatron sums the gradients of weights so marked
        return made

    replace(stack, owner, name, staticmethod(norm))


def _any_width(
    initialize: Call,
    this: Any,
    config: Any,
    *args: Any,
    k_channels: int | None = None,
    v_channels: int | None = None,
    **kwargs: Any,
) -> None:
    alone = copy.copy(config)
    alone.context_parallel_size = 1
    if v_channels is not None:
        alone.kv_channels = v_channels
    if k_channels is not None and kwargs.get("softmax_scale") is None:
        kwargs["softmax_scale"] = k_channels**-0.5  # upstream computes the scale from its only width
    initialize(this, alone, *args, **kwargs)
    this.config = config


def _attention_to_all(attend: Call, this: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    if this.config.context_parallel_size > 1:
        key, value = in_order(key), in_order(value)
    return attend(this, query, key, value, *args, **kwargs)


def in_order(part: torch.Tensor) -> torch.Tensor:
    """Gather the whole sequence [s, ...] from the context-parallel ranks' parts [s/cp, ...], with gradients.

    Megatron cuts a sequence into 2 cp chunks and gives rank r the chunks r and 2 cp - 1 - r; its dataset's mask has the
    rows of these chunks, and the columns of all.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    owner, name = _GATHER.resolve()
    chunks = getattr(owner, name)(part, group=group).chunk(2 * group.size())
    return torch.cat((*chunks[::2], *reversed(chunks[1::2])))


def _token_counts_on_host(move: Call, tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    # Upstream converts only tensors on a device to an array, and a collective accepts no tensor as sizes.
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else move(tensor, as_numpy, record_stream)
