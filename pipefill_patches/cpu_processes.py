"""The CPU backend in the processes that a rank starts, and what a checkpoint's copy to the host is there.

A forked process has the patches of its rank.  One that is spawned, or that a fork server forks, imports torch and
Megatron anew: upstream's persistent checkpoint worker is one, and asks for its CUDA device first.

On a GPU a checkpoint is copied to the host before the training goes on, and is written from there.  Tensors that are
on the CPU are not copied by ``to("cpu")``: the worker would read the very parameters that the optimizer changes.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from pipefill_patches import cpu_torch
from pipefill_patches.registry import Target, replace

_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync"
PREPARE = Target(f"{_WRITER}.prepare_write_data", ("self", "plan", "planner"), uses=("write_buckets",))


class OnCpu:
    """A function with the torch half of the CPU backend; it can be sent to another process if the function can."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            cpu_torch.install(stack)
            return self._function(*args, **kwargs)


def _with_backend(start: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(start)
    def run(self: Any) -> None:
        method = self._start_method or multiprocessing.get_start_method()
        if method != "fork" and self._target is not None:
            self._target = OnCpu(self._target)
        start(self)

    return run


def _copied(prepare: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(prepare)
    def run(self: Any, plan: Any, planner: Any) -> None:
        prepare(self, plan, planner)
        self.write_buckets = [
            (path, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for path, key, (data, tensors) in self.write_buckets
        ]

    return run


def install(stack: contextlib.ExitStack) -> None:
    """Let the processes that this one starts run on the CPU too, until ``stack`` is closed."""
    replace(stack, BaseProcess, "start", _with_backend(BaseProcess.start))
    holder, name = PREPARE.resolve()
    replace(stack, holder, name, _copied(getattr(holder, name)))
