"""Iteration boundaries, disturbances, and the drain bubble.

The drain bubble is not in the pipeline's transfers: after its last backward a rank waits in the first collective that
spans stages (tied embeddings' gradients, the gradient norm), inside ``train_step``.  So the blocking collectives are
watched from the last backward to the end of ``train_step``; those within one stage (data or tensor parallel) are not
pipeline bubbles and are left alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

from megatron.fill.attached import attached
from megatron.fill.hooks import bus
from megatron.fill.launcher import local_rank, ranks_here
from megatron.fill.types import RankInfo
from pipefill_patches import cpu_backend
from pipefill_patches.registry import Patch, Target, replace

_TRAINING = "megatron.training.training"
_TRAIN_STEP = Target(
    f"{_TRAINING}:train_step",
    ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config",
     "forward_backward_func", "iteration"),
)  # fmt: skip
_EVALUATE = Target(f"{_TRAINING}:evaluate", ("forward_step_func", "data_iterator", "model"))
_SAVE = Target(f"{_TRAINING}:save_checkpoint_and_time", ("iteration", "model", "optimizer"))
_INITIALIZE = Target(f"{_TRAINING}:initialize_megatron", ())
COLLECTIVES = (
    Target("torch.distributed:all_reduce", ("tensor", "op", "group", "async_op")),
    Target("torch.distributed:broadcast", ("tensor", "src", "group", "async_op")),
)


def _rank_info() -> RankInfo:
    import torch
    from megatron.core import parallel_state

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if torch.distributed.get_backend() == "fake":  # this process is all there is
        rank, world_size = 0, 1
    local_world_size = ranks_here(world_size)
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank(rank % local_world_size),
        local_world_size=local_world_size,
        node=int(os.environ.get("GROUP_RANK") or rank // local_world_size),
        nodes=int(os.environ.get("GROUP_WORLD_SIZE") or max(1, world_size // local_world_size)),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        stages=parallel_state.get_pipeline_model_parallel_world_size(),
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        device="cpu" if cpu_backend.PATCH.applied else f"cuda:{torch.cuda.current_device()}",
    )


@functools.cache
def _spans_stages(group: Any) -> bool:
    """Whether the process group (None: the whole world) has ranks of more than one stage of this rank's pipeline."""
    import torch
    from megatron.core import parallel_state

    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() == 1:
        return False
    if group is None:
        return True
    ranks = torch.distributed.get_process_group_ranks(group)
    return len(set(ranks) & set(torch.distributed.get_process_group_ranks(pipeline))) > 1


def waits_in_drain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a collective, called now with these arguments, blocks in the drain and spans stages."""
    group = kwargs.get("group") or (args[2] if len(args) > 2 else None)
    waits = not (kwargs.get("async_op") or (len(args) > 3 and args[3]))
    return bus.in_drain and waits and _spans_stages(group)


def _watched(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not waits_in_drain(args, kwargs):
            return collective(*args, **kwargs)
        try:
            return bus.wait(functools.partial(collective, *args, **kwargs))
        finally:
            bus.close()

    return run


def _install(stack: contextlib.ExitStack) -> None:
    holder, name = _TRAIN_STEP.resolve()
    train_step = getattr(holder, name)

    @functools.wraps(train_step)
    def watched_step(*args: Any, **kwargs: Any) -> Any:
        bus.begin_iteration((kwargs.get("iteration") or 0) + 1)
        try:
            return train_step(*args, **kwargs)
        finally:
            bus.end_iteration()

    replace(stack, holder, name, watched_step)

    for target, reason in ((_EVALUATE, "evaluation"), (_SAVE, "checkpoint")):
        holder, name = target.resolve()
        replace(stack, holder, name, _disturbing(getattr(holder, name), reason))

    holder, name = _INITIALIZE.resolve()
    initialize = getattr(holder, name)

    @functools.wraps(initialize)
    def initialize_then_start(*args: Any, **kwargs: Any) -> Any:
        result = initialize(*args, **kwargs)
        from megatron.training import get_args

        attached.started(_rank_info(), get_args())
        return result

    replace(stack, holder, name, initialize_then_start)

    for target in COLLECTIVES:
        holder, name = target.resolve()
        replace(stack, holder, name, _watched(getattr(holder, name)))
    stack.callback(_spans_stages.cache_clear)


def _disturbing(original: Callable[..., Any], reason: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            bus.disturb(reason)

    return run


PATCH = Patch(
    "training_loop",
    "iterations begin and end in train_step; the drain hides in the collectives inside it",
    _install,
    (_TRAIN_STEP, _EVALUATE, _SAVE, _INITIALIZE, *COLLECTIVES),
)
