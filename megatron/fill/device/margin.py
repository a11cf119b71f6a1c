"""The training's own margin: device memory that its allocator has reserved but not needed so far.

A worker may take free memory at the moment when the training needs it, and an allocation that fails ends the training.
Memory that the training's caching allocator has reserved belongs to the training alone.  So the rank makes its
allocator reserve a margin beyond its peak use when filling begins, and again when it has grown into the margin.
Nothing is written to that memory, and the rank never waits for another process.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

from megatron.fill.device.port import MIB

DRIVER_BYTES = 256 * MIB  # memory that stays free in the driver in addition: NCCL and cuBLAS allocate there
_PIECE_BYTES = 64 * MIB


class Allocator(Protocol):
    """A caching allocator, which keeps memory that it has reserved from the driver, in use or not.

    ``take`` allocates bytes that return to its cache when the result is dropped; MemoryError if the driver has none.
    """

    def reserved_bytes(self) -> int: ...

    def peak_bytes(self) -> int: ...

    def take(self, size: int) -> Any: ...


def keep_margin(allocator: Allocator, margin_bytes: int) -> int:
    """Reserve the missing part of a margin beyond the peak; return the number of bytes that could not be reserved.

    The allocator serves a request from its cache first.  So pieces are allocated and held until it has had to reserve
    the missing memory, and then freed at once.
    """
    wanted = allocator.peak_bytes() + margin_bytes
    held: list[Any] = []
    with suppress(MemoryError):
        while allocator.reserved_bytes() < wanted:
            held.append(allocator.take(_PIECE_BYTES))
    return max(0, wanted - allocator.reserved_bytes())


class CudaAllocator:
    """PyTorch's caching allocator of a device; to be used in the thread and stream in which the training computes."""

    def __init__(self, device: str) -> None:
        self._device = device

    def reserved_bytes(self) -> int:
        import torch

        return torch.cuda.memory_reserved(self._device)

    def peak_bytes(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated(self._device)

    def take(self, size: int) -> Any:
        import torch

        try:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryError from error
