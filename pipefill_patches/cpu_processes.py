"""The CPU backend in the processes that a rank starts, and the copy of a checkpoint's tensors there.

A forked process has the patches of its rank.  A process that is spawned, or forked by a fork server, imports torch and
Megatron again: upstream's persistent checkpoint worker is one, and asks for its CUDA device first.

On a GPU a checkpoint is copied to the host before the training continues, and is written from there.  Tensors on the
CPU are not copied by ``to("cpu")``: the worker would read the very parameters that the optimizer changes.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from pipefill_patches import cpu_torch
from pipefill_patches.patch import Call, Target, around

_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync"
PREPARE = Target(f"{_WRITER}.prepare_write_data", ("self", "plan", "planner"), uses=("write_buckets",))


def _on_cpu(function: Call, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function with the torch half of the CPU backend."""
    with contextlib.ExitStack() as stack:
        cpu_torch.install(stack)
        return function(*args, **kwargs)


def _with_backend(start: Callable[[Any], None], process: Any) -> None:
    method = process._start_method or multiprocessing.get_start_method()
    if method != "fork" and process._target is not None:
        process._target = functools.partial(_on_cpu, process._target)  # which can be pickled, as a closure cannot
    start(process)


def _copied(prepare: Call, writer: Any, plan: Any, planner: Any) -> None:
    prepare(writer, plan, planner)
    writer.write_buckets = [
        (path, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for path, key, (data, tensors) in writer.write_buckets
    ]


def install(stack: contextlib.ExitStack) -> None:
    """Make the processes that this one starts run on the CPU too, until ``stack`` is closed."""
    around(stack, BaseProcess, "start", _with_backend)
    around(stack, *PREPARE.resolve(), _copied)
