"""Iteration boundaries, disturbances, the account outside of schedules, and collectives (``collectives.py``)."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from threading import get_ident
from typing import Any

from megatron.fill.account import EVALUATION, HOST, LOOP, START
from megatron.fill.attached import attached
from megatron.fill.hooks import bus
from megatron.fill.launcher import local_rank, ranks_here
from megatron.fill.types import RankInfo
from pipefill_patches import collectives, cpu_backend
from pipefill_patches.patch import Call, Patch, Target, around, definers, wrap

logger = logging.getLogger("pipefill")

_TRAINING = "megatron.training.training"
_TRAIN_STEP = Target(
    f"{_TRAINING}:train_step",
    ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config",
     "forward_backward_func", "iteration"),
)  # fmt: skip
_TRAIN = Target(f"{_TRAINING}:train", ("forward_step_func", "model", "optimizer"))
_EVALUATE = Target(f"{_TRAINING}:evaluate", ("forward_step_func", "data_iterator", "model"))
_SAVE = Target(f"{_TRAINING}:save_checkpoint_and_time", ("iteration", "model", "optimizer"))
# Every capture ends here: Megatron's of a layer, of an iteration and of the optimizer, and Transformer Engine's.
_CAPTURE = Target("torch.cuda.graphs:graph.__exit__", ("self",))
_FINALIZE = Target(f"{_TRAINING}:maybe_finalize_async_save", ("blocking",))
_LOG = Target(f"{_TRAINING}:training_log", ("loss_dict", "total_loss_dict", "learning_rate", "iteration"))
_LOAD = Target(f"{_TRAINING}:load_checkpoint", ("ddp_model", "optimizer", "opt_param_scheduler"))
_GRADIENTS = Target(f"{_TRAINING}:finalize_model_grads", ("model", "num_tokens"))
_NEXT_BATCH = Target("megatron.core.rerun_state_machine:RerunDataIterator.__next__", ("self",))
# The end of a loader waits for its workers, which may be in a batch.
_END_LOADER = Target("torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._shutdown_workers", ("self",))
_ZERO_GRADIENTS = Target("megatron.core.distributed:DistributedDataParallel.zero_grad_buffer", ("self",))
_OPTIMIZER = Target("megatron.core.optimizer.optimizer:MegatronOptimizer.step", ("self",))
_INITIALIZE = Target(f"{_TRAINING}:initialize_megatron", ())


def _rank_info() -> RankInfo:
    import torch
    from megatron.core import parallel_state

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if torch.distributed.get_backend() == "fake":  # this process is the only one
        rank, world_size = 0, 1
    local_world_size = ranks_here(world_size)
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank(rank, world_size),
        local_world_size=local_world_size,
        node=int(os.environ.get("GROUP_RANK") or rank // local_world_size),
        nodes=int(os.environ.get("GROUP_WORLD_SIZE") or max(1, world_size // local_world_size)),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        stages=parallel_state.get_pipeline_model_parallel_world_size(),
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        expert_data_parallel_rank=parallel_state.get_expert_data_parallel_rank(),
        device="cpu" if cpu_backend.PATCH.applied else f"cuda:{torch.cuda.current_device()}",
    )


def _timers() -> dict[str, float]:
    """Return the seconds of Megatron's timers, which their printing does not reset; another thread reads them."""
    from megatron.training import get_timers

    timers = get_timers()
    if timers._log_level < 1:
        return {}
    return {name: timer.active_time() for name, timer in list(timers._timers.items())}


def _install(stack: contextlib.ExitStack) -> None:
    around(stack, *_TRAIN_STEP.resolve(), _watched)
    for target, reason in ((_EVALUATE, EVALUATION), (_SAVE, "checkpoint"), (_CAPTURE, "graph capture")):
        around(stack, *target.resolve(), _disturbing, reason)
    _install_account(stack)
    around(stack, *_INITIALIZE.resolve(), _starting)
    around(stack, *_LOG.resolve(), _logging_figures)
    collectives.install(stack)


def _watched(train_step: Call, /, *args: Any, **kwargs: Any) -> Any:
    iteration = (kwargs.get("iteration") or 0) + 1
    attached.iteration_began(iteration)
    bus.begin_iteration(iteration)
    try:
        return _accounted(train_step, HOST, False, *args, **kwargs)
    finally:
        bus.end_iteration()


def _starting(initialize: Call, /, *args: Any, **kwargs: Any) -> Any:
    if attached.on_restart is not None:
        attached.on_restart()
    result = initialize(*args, **kwargs)
    from megatron.training import get_args

    bus.account.timers = _timers
    attached.started(_rank_info(), get_args())
    return result


def _logging_figures(log: Call, /, *args: Any, **kwargs: Any) -> Any:
    result = log(*args, **kwargs)
    if attached.figures is not None:
        try:
            _write_figures(kwargs["iteration"] if "iteration" in kwargs else args[3])
        except Exception:
            attached.figures = None
            logger.exception("the figures of filling cannot be written any more; the training goes on")
    return result


def _write_figures(iteration: int) -> None:
    """Write the figures of the run with Megatron's own writers, on the rank that has them, at each log interval."""
    from megatron.training import get_args
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    board, wandb = get_tensorboard_writer(), get_wandb_writer()
    if not (board or wandb) or attached.figures is None or iteration % get_args().log_interval:
        return
    figures = {f"fill/{name.replace('_', '-')}": value for name, value in attached.figures().items()}
    if board:
        for name, value in figures.items():
            board.add_scalar(name, value, iteration)
    if wandb and figures:
        wandb.log(figures, iteration)


def _install_account(stack: contextlib.ExitStack) -> None:
    """Bracket what a training does outside of passes and waits."""
    around(stack, *_TRAIN.resolve(), _looped)
    around(stack, *_EVALUATE.resolve(), _evaluated)
    for target, what, whole in (
        (_SAVE, "save", True),
        (_LOAD, "load", True),
        (_LOG, "logging", False),
        (_GRADIENTS, "gradients", False),
        (_ZERO_GRADIENTS, "gradients", False),
        (_NEXT_BATCH, "data loading", True),
        (_END_LOADER, "data loading", True),
    ):
        around(stack, *target.resolve(), _accounted, what, whole)
    around(stack, *_FINALIZE.resolve(), _finalized)
    wrap(stack, *_SAVE.resolve(), bus.saving())
    around(stack, os, "fsync", _waiting, bus.wait_in_save)
    around(stack, *_NEXT_BATCH.resolve(), _waiting, bus.wait_for_batch)
    for name, what in (("step", "optimizer"), ("zero_grad", "gradients")):
        for kind in definers(_OPTIMIZER.resolve()[0], name):
            around(stack, kind, name, _accounted, what, False)


def _looped(train: Call, /, *args: Any, **kwargs: Any) -> Any:
    """Run the training loop, which belongs to the start-up until its first iteration."""
    return _accounted(train, LOOP if bus.account.settled else START, False, *args, **kwargs)


def _evaluated(evaluate: Call, /, *args: Any, **kwargs: Any) -> Any:
    """Evaluate, which ends the start-up of a training that has no iteration to do."""
    bus.account.settle()
    return _accounted(evaluate, EVALUATION, False, *args, **kwargs)


def _finalized(finalize: Call, /, *args: Any, **kwargs: Any) -> Any:
    """End the saves in the background that are ready, or all; Megatron asks for it also where there are none."""
    from megatron.training import get_args

    if not get_args().async_save:
        return finalize(*args, **kwargs)
    return _accounted(finalize, "save", True, *args, **kwargs)


def _accounted(original: Call, what: str, whole: bool, /, *args: Any, **kwargs: Any) -> Any:
    account = bus.account
    if account.thread != get_ident():
        return original(*args, **kwargs)
    depth = account.enter(what, whole=whole)
    try:
        return original(*args, **kwargs)
    finally:
        account.leave(depth)


def _waiting(original: Call, wait: Callable[[Callable[[], Any]], Any], /, *args: Any, **kwargs: Any) -> Any:
    return wait(functools.partial(original, *args, **kwargs))


def _disturbing(original: Call, reason: str, /, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    finally:
        bus.disturb(reason)


PATCH = Patch("training_loop", _install, (_TRAIN, _TRAIN_STEP, _EVALUATE, _SAVE, _CAPTURE, _INITIALIZE, _LOG))
