"""Megatron on a machine without a CUDA device: it runs on the CPU over gloo, one core per rank.

It is for trials, tests and measuring schedules on a laptop.  It is applied only if ``needed()`` or requested; the CUDA
path is not affected.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
from typing import Any

import torch

from megatron.fill.errors import ConfigError
from megatron.fill.launcher import cores_by_srun, local_rank, ranks_here
from pipefill_patches import arguments, cpu_gloo, cpu_layers, cpu_processes, cpu_torch, wheel
from pipefill_patches.patch import Call, Patch, Target, around, replace

_RNG_LOGGER = "megatron.core.tensor_parallel.random"
_ENERGY = Target("megatron.core.energy_monitor:EnergyMonitor.setup", ("self",), uses=("has_nvml",))


def needed() -> bool:
    """True if this machine has no CUDA device, or the patch is applied."""
    return PATCH.applied or not torch.cuda.is_available()


def _placed(ranks: int) -> str:
    """Describe how the ranks of this machine are placed on its cores; call it before this one is pinned."""
    cores = len(os.sched_getaffinity(0))
    if ranks <= cores or cores <= cores_by_srun():  # srun binds each rank to its own cores, and hides the others
        return "one core per rank"
    # Launchers give each rank a session, and the kernel shares a core among sessions, for any scheduling class.
    few = f"{cores} core{'s' * (cores != 1)}"
    return (
        f"{ranks} ranks on {few}: one computes in another's bubbles, and jobs take its time; expected a core for each "
        "rank"
    )


def _pin_to_core(stack: contextlib.ExitStack, local_rank: int) -> None:
    """Pin all threads of this process, and those they start, to one core, until ``stack`` is closed.

    The core is the ``local_rank``-th of those the process may use, modulo their number.  Call it before any process
    group exists: gloo's threads inherit the mask of the thread that starts them.
    """
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0)
    masks = {}
    for thread in _threads():
        with contextlib.suppress(ProcessLookupError):
            masks[thread] = os.sched_getaffinity(thread)
    stack.callback(_pin, masks, set().union(*masks.values()))  # also threads that have inherited the one core
    _pin({}, {sorted(cores)[local_rank % len(cores)]})


def _pin(masks: dict[int, set[int]], others: set[int]) -> None:
    """Pin each thread of this process to its cores; those without a mask to ``others``."""
    for thread in _threads():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, masks.get(thread, others))


def _threads() -> list[int]:
    return [int(thread) for thread in os.listdir("/proc/self/task")]


def _defaults() -> dict[str, Any]:
    """Return Megatron's parser defaults on the CPU, by dest: features of CUDA, Transformer Engine or Apex are off."""
    from megatron.core.transformer.enums import AttnBackend

    return {
        "distributed_backend": "gloo",
        "transformer_impl": "local",
        "attention_backend": AttnBackend.unfused,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "no_persist_layer_norm": True,
        "apply_rope_fusion": False,
        "pin_cpu_grads": False,
        "pin_cpu_params": False,
        "num_workers": 0,  # a loader's workers would share the rank's one core
    }


def _backend(name: str) -> str:
    if "nccl" in name:
        raise ConfigError(f"--distributed-backend {name}: needs a CUDA device, this run has none; expected gloo")
    return name


def _with_cpu_defaults(add: Call, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    actions = wheel.set_defaults(add(parser), _defaults(), PATCH)
    actions["distributed_backend"].type = _backend
    return parser


def _is_news(record: logging.LogRecord) -> bool:
    # The tracker warns if the CPU's generator advances inside a fork.  Here that generator is the forked one.
    return "CPU RNG state changed" not in record.getMessage()


def _install(stack: contextlib.ExitStack) -> None:
    reason = "CUDA is left alone" if torch.cuda.is_available() else "no CUDA device"
    placed = _placed(ranks_here(1))
    _pin_to_core(stack, local_rank())
    cpu_torch.install(stack)
    cpu_gloo.install(stack)
    cpu_processes.install(stack)
    around(stack, *arguments.ADD.resolve(), _with_cpu_defaults)
    around(stack, *wheel.COMPILE.resolve(), wheel.unless_shipped)
    wheel.resumable_adam(stack)
    cpu_layers.install(stack)
    # For --log-energy, which asks NVIDIA's driver wherever pynvml can be imported; without it the energy is 0.
    replace(stack, importlib.import_module("megatron.core.energy_monitor"), "has_nvml", False)
    logger = logging.getLogger(_RNG_LOGGER)
    logger.addFilter(_is_news)
    stack.callback(logger.removeFilter, _is_news)
    if os.environ.get("RANK", "0") == "0":
        print(f"PipeFill: {reason}: Megatron runs on the CPU over gloo, {placed}", flush=True)


PATCH = Patch(
    "cpu_backend",
    _install,
    targets=(
        arguments.ADD,
        wheel.COMPILE,
        Target("megatron.core.tensor_parallel.random:_get_cuda_rng_state", ("device", "clone", "graph_safe")),
        Target("megatron.core.tensor_parallel.random:_set_cuda_rng_state", ("new_state", "device", "graph_safe")),
        cpu_processes.PREPARE,
        _ENERGY,
        *cpu_layers.TARGETS,
    ),
)
