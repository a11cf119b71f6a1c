"""The margin that the training owns: device memory that its own allocator holds and has never needed so far.

Free memory is anybody's: a worker may take it in the moment in which the training wants to grow, and an allocation that
fails ends the training at once.  What the training's caching allocator has reserved is the training's alone.  So the
rank has its allocator reserve the margin beyond what it has used at most, when filling begins, and again when it has
grown into it.  Nothing is written to that memory, and the rank never waits for anybody.
"""

from __future__ import annotations

from typing import Any, Protocol

from megatron.fill.device.port import MIB

DRIVER_BYTES = 256 * MIB  # what stays free in the driver all the same: NCCL and cuBLAS allocate there
_PIECE_BYTES = 64 * MIB


class Allocator(Protocol):
    """A caching allocator: what it has reserved it keeps."""

    def reserved_bytes(self) -> int:
        """All that it has got from the driver."""

    def peak_bytes(self) -> int:
        """The most that has been in use at once."""

    def take(self, size: int) -> Any:
        """Allocate; the memory is given back to the allocator's cache when the result is dropped.

        Raises:
            MemoryError: the driver has no more.
        """


class OwnedMargin:
    """Keeps a margin reserved in the training's allocator.

    Args:
        margin_bytes: to be reserved beyond the peak.
    """

    def __init__(self, allocator: Allocator, margin_bytes: int) -> None:
        self._allocator = allocator
        self.margin_bytes = margin_bytes

    def keep(self) -> int:
        """Reserve what is missing; returns the bytes that could not be had.

        The allocator serves a request from its cache first.  So pieces are taken, and held, until it has had to reserve
        as much as is missing, and then given back at once.
        """
        allocator = self._allocator
        wanted = allocator.peak_bytes() + self.margin_bytes
        held: list[Any] = []
        try:
            while allocator.reserved_bytes() < wanted:
                held.append(allocator.take(_PIECE_BYTES))
        except MemoryError:
            pass
        return max(0, wanted - allocator.reserved_bytes())


class CudaAllocator:
    """PyTorch's, of one device, for the thread and the stream in which the training computes."""

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
