"""The CUDA side of a worker's limits and of the memory that the main job leaves free."""

from __future__ import annotations

import time


def cap_memory(device: str, memory_bytes: int | None) -> None:
    """Make this process's CUDA allocations beyond ``memory_bytes`` fail, through PyTorch's caching allocator."""
    if memory_bytes is None:
        return
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total), device)


class FreeDeviceMemory:
    """The device's free memory in bytes, as the driver says; read at most every quarter of a second."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._read_ns = 0
        self._bytes = 0

    def __call__(self) -> int:
        import torch

        now_ns = time.monotonic_ns()
        if now_ns - self._read_ns > 250_000_000:
            self._bytes = torch.cuda.mem_get_info(self._device)[0]
            self._read_ns = now_ns
        return self._bytes
