"""Memory that a language model's passes take, and the pieces that they are cut into."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron.fill.device.meter import resident_bytes
from megatron.fill.errors import TaskError
from megatron.fill.linux.held import private_bytes
from megatron.fill.wings.llm.requests import Refused, Request

# A piece of a pass is to take a few milliseconds: products of a weight and a token.
_PIECE = {"cpu": 20e6, "cuda": 200e9}


def pieces_of(model: Any, tokens: int, device: str) -> int:
    """Number of pieces of a pass over this many tokens."""
    size = sum(parameter.numel() for parameter in model.base_model.parameters())
    return math.ceil(size * tokens / _PIECE[device.partition(":")[0]])


def pass_bytes(config: Any, tokens: int) -> int:
    """Bytes that a pass takes besides weights, keys and values: logits twice, and a layer's activations."""
    inner = max(4 * config.hidden_size, getattr(config, "intermediate_size", None) or 0)
    return tokens * (2 * config.vocab_size + 6 * inner) * 4


def key_value_bytes(asked: int | None, memory_bytes: int | None, taken: int, least: int) -> int | None:
    """The most that keys and values may take; None for no limit.

    Args:
        asked: the user's limit; None for none.
        memory_bytes: the job's memory; None for no limit.
        taken: part of it that models and passes take.
        least: smallest useful amount.

    Raises:
        TaskError: that much is not left.
    """
    limits = [] if asked is None else [asked]
    if memory_bytes is not None:
        limits.append(memory_bytes - taken)
    if not limits:
        return None
    if min(limits) < least:
        left = max(0, min(limits)) >> 10
        raise TaskError(
            f"{left:,} KiB are left for keys and values; expected {-(-least >> 10):,} KiB at least: give the job "
            "more memory, or smaller batch_sizes and chunks"
        )
    return min(limits)


def longest(lines: Iterable[Request | Refused], context: int) -> int:
    """Tokens that no sequence exceeds: a token is a byte at least, but for a few of a chat's template."""
    sizes = [
        max(len(str(one).encode()) for one in line.prompts or (f"{line.messages}{line.tools}{line.template}",))
        + (line.max_tokens or context)
        for line in lines
        if isinstance(line, Request)
    ]
    return min(context, 256 + max(sizes, default=0))


def held_bytes(device: str) -> int:
    """Bytes of the device's memory that this process holds: on the CPU without files' pages, as the agent counts."""
    if device == "cpu":
        return private_bytes(os.getpid())
    import torch

    return torch.cuda.memory_reserved(device)


def claimed_bytes(device: str) -> int:
    """Bytes that count against this process's limit: on the CPU all that it asked for (RLIMIT_DATA)."""
    if device != "cpu":
        return held_bytes(device)
    text = Path("/proc/self/status").read_text(encoding="ascii")
    data = next(line for line in text.splitlines() if line.startswith("VmData:"))
    return max(resident_bytes(), int(data.split()[1]) * 1024)


def release(device: str) -> None:
    """Give back what tensors that are gone have left in the allocator's cache."""
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()


def settle(device: str) -> None:
    """A step ends when its kernels do."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def clock(device: str) -> Callable[[], float]:
    """Clock of the seconds that a step has the device: on the CPU thread time, since the training interrupts steps."""
    return time.thread_time if device == "cpu" else time.perf_counter
