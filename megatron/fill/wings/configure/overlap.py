"""Flags that let exchanges overlap where Megatron does not start with them, as layouts have them or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute

_EXPERTS = "--overlap-moe-expert-parallel-comm"
_AT_STEP = "--overlap-param-gather-with-optimizer-step"


def expert_problem(model: ModelSpec, its: Parallel) -> str:
    """Return what Megatron expects of a layout whose experts' exchange is to be hidden; "" if it has that.

    As in Megatron-core 0.19, ``TransformerConfig``.
    """
    if not model.kernels.overlaps.experts:
        return ""
    if its.ep == 1:
        return f"with {_EXPERTS}, --expert-model-parallel-size is above 1"
    if its.pp > 1 and its.chunks == 1:
        return f"with {_EXPERTS}, several stages have virtual stages"
    if its.recompute is Recompute.FULL or its.computes_again("moe"):
        return f"with {_EXPERTS}, neither whole layers nor moe are recomputed"
    if its.precision is Precision.FP32 or model.predicted > 1:
        return f"with {_EXPERTS}, numbers have 16 bits and --mtp-num-layers is at most 1"
    return ""


def recomputations(model: ModelSpec, fixed: Mapping[str, Any]) -> tuple[Recompute, ...]:
    """Return the kinds of recomputation that a training may have, the least first.

    Args:
        fixed: as ``Training`` has it.
    """
    if "recompute" in fixed:
        return (fixed["recompute"],)
    if not model.kernels.overlaps.experts:
        return tuple(Recompute)
    inner = "moe" in fixed.get("recompute_modules", ())
    return (Recompute.NONE,) if inner else (Recompute.NONE, Recompute.SELECTIVE)


def startable(flags: Sequence[str], its: Parallel) -> list[str]:
    """Return flags without those that would overlap what a layout does not exchange.

    As Megatron's ``validate_args`` has it, tensor parallelism's exchange overlaps with sequence parallelism alone, and
    that of weights with the distributed optimizer.
    """
    without = set() if its.sequence_parallel else {"--tp-comm-overlap"}
    without |= set() if its.distributed_optimizer else {"--overlap-param-gather", _AT_STEP}
    without |= set() if its.chunks > 1 else {_AT_STEP}
    return [flag for flag in flags if flag not in without]


def connections(flags: Sequence[str], its: Parallel) -> list[str]:
    """Return a script's lines that set a GPU's hardware queues, which decide what goes on beside what up to Hopper."""
    hidden = _EXPERTS in flags
    exchanges = its.tp > 1 or its.cp > 1
    note = "# 1 for tensor and context parallelism; 32 hides more of what experts exchange, and Megatron takes it too."
    count = 32 if hidden and not exchanges else 1
    set_it = f"export CUDA_DEVICE_MAX_CONNECTIONS=${{CUDA_DEVICE_MAX_CONNECTIONS:-{count}}}"
    return [note, set_it] if hidden and exchanges else [set_it]
