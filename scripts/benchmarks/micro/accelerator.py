"""What the measurements need of a GPU, and that of CUDA through torch."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from megatron.fill.pages.ring import Ring
from megatron.fill.rank.signals import Signals

_GEMM_S = 5e-3
_GRAIN = 256  # of a matrix's size
_MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_WARM_S = 1.0  # a GPU that was idle runs at a fraction of its clock


class Accelerator(Protocol):
    """One device and its stream.  What is launched runs in order, behind what was launched before."""

    def warm(self) -> None:
        """Raise the clocks, and learn how long things take; before anything is launched."""

    def tiny(self) -> None:
        """Launch the smallest kernel."""

    def gemm(self) -> None:
        """Launch a matrix product that takes the whole device some 5 ms when nobody else is there."""

    def spin(self, seconds: float) -> None:
        """Launch a kernel of one block that does nothing for so long, as a receive of NCCL's that waits."""

    def synchronize(self) -> None:
        """Wait until all that was launched is done."""

    def signals(self, ring: Ring, written: bool = False) -> Signals:
        """Marks in the stream, posted or written."""

    def gate(self, behind_event: bool) -> tuple[Callable[[], None], Callable[[], None]]:
        """What has the stream wait without any kernel, until a word of host memory is set; and what sets it.

        Args:
            behind_event: another stream waits for the word, and the stream for an event of that one.
        """

    def set_clock(self) -> None:
        """Compare the device's clock with the host's, while the device is idle; good for some milliseconds."""

    def note(self) -> Callable[[], int]:
        """Note this place in the stream; after ``synchronize``: when the device was there, in the host's ns."""

    def context(self) -> dict[str, Any]:
        """What is known of this process's context."""

    def cap(self, memory_bytes: int) -> None:
        """Hold this process to so much memory, as a worker is held."""

    def allocate(self, memory_bytes: int) -> bool:
        """Whether so much memory can be had; it is given back."""


class Cuda:
    """The first CUDA device (an Accelerator)."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda:0")
        self._one = torch.zeros(1, device=self._device)
        self._cycles_per_s = 1e9
        self._size = 4096
        self._matrices: Any = None
        self._base = torch.cuda.Event(enable_timing=True)
        self._base_ns = 0
        self._pages: list[mmap.mmap] = []  # registered with the driver, so they stay mapped
        self.clock_error_ns = 0

    def warm(self) -> None:
        self._use(4096)
        until_s = time.monotonic() + _WARM_S
        while time.monotonic() < until_s:
            self.gemm()
            self.synchronize()
        usual_s = min(self._taken_s(self.gemm) for _ in range(5))
        self._use(int(4096 * (_GEMM_S / usual_s) ** (1 / 3)) // _GRAIN * _GRAIN)
        cycles = 10_000_000
        self._cycles_per_s = cycles / min(self._taken_s(lambda: self._torch.cuda._sleep(cycles)) for _ in range(5))

    def tiny(self) -> None:
        self._one.add_(1)

    def gemm(self) -> None:
        left, right, product = self._matrices
        self._torch.mm(left, right, out=product)

    def spin(self, seconds: float) -> None:
        self._torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(self._device)

    def signals(self, ring: Ring, written: bool = False) -> Signals:
        from megatron.fill.rank.signals import PostedSignals, WrittenSignals

        return (WrittenSignals if written else PostedSignals)("cuda:0", ring)

    def gate(self, behind_event: bool) -> tuple[Callable[[], None], Callable[[], None]]:
        torch, page = self._torch, mmap.mmap(-1, mmap.PAGESIZE)
        self._pages.append(page)
        driver, at = _mapped(page)
        ours = torch.cuda.current_stream(self._device)
        stream = torch.cuda.Stream(self._device) if behind_event else ours

        def wait() -> None:
            handle = ctypes.c_void_p(stream.cuda_stream)
            _check(driver.cuStreamWaitValue32_v2(handle, at, ctypes.c_uint32(1), _EQUAL), "wait for a word of")
            if behind_event:
                ours.wait_event(stream.record_event())

        def release() -> None:
            page[:4] = (1).to_bytes(4, sys.byteorder)

        return wait, release

    def set_clock(self) -> None:
        best_ns = 1 << 62
        for _ in range(5):
            event = self._torch.cuda.Event(enable_timing=True)
            before_ns = time.monotonic_ns()
            event.record()
            event.synchronize()
            taken_ns = time.monotonic_ns() - before_ns
            if taken_ns < best_ns:
                best_ns, self._base, self._base_ns = taken_ns, event, before_ns + taken_ns // 2
        self.clock_error_ns = max(self.clock_error_ns, best_ns // 2)

    def note(self) -> Callable[[], int]:
        event, base, base_ns = self._torch.cuda.Event(enable_timing=True), self._base, self._base_ns
        event.record()
        return lambda: base_ns + int(base.elapsed_time(event) * 1e6)

    def context(self) -> dict[str, Any]:
        torch = self._torch
        asked: list[float] = []
        for _ in range(200):
            before_ns = time.monotonic_ns()
            torch.cuda.mem_get_info(self._device)
            asked.append((time.monotonic_ns() - before_ns) / 1e3)
        return {"torch": torch.__version__, "cuda": torch.version.cuda, "mem_get_info_us": asked}

    def cap(self, memory_bytes: int) -> None:
        from megatron.fill.device.cuda import cap_memory

        cap_memory("cuda:0", memory_bytes)

    def allocate(self, memory_bytes: int) -> bool:
        try:
            self._torch.empty(memory_bytes, dtype=self._torch.uint8, device=self._device)
        except self._torch.OutOfMemoryError:
            return False
        self._torch.cuda.empty_cache()
        return True

    def _use(self, size: int) -> None:
        torch = self._torch
        self._matrices = [torch.randn(size, size, device=self._device, dtype=torch.bfloat16) for _ in range(3)]

    def _taken_s(self, launch: Callable[[], object]) -> float:
        self.synchronize()
        start_s = time.monotonic()
        launch()
        self.synchronize()
        return time.monotonic() - start_s


def _mapped(page: mmap.mmap) -> tuple[ctypes.CDLL, ctypes.c_uint64]:
    """The driver, and where the device finds the page."""
    driver, host = ctypes.CDLL("libcuda.so.1"), ctypes.addressof(ctypes.c_char.from_buffer(page))
    at = ctypes.c_uint64()
    _check(driver.cuMemHostRegister_v2(ctypes.c_void_p(host), ctypes.c_size_t(len(page)), _MAPPED), "register")
    _check(driver.cuMemHostGetDevicePointer_v2(ctypes.byref(at), ctypes.c_void_p(host), 0), "map")
    return driver, at


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver cannot {what} host memory: code {code}")
