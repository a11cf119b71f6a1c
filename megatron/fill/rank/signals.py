"""Signals from the GPU in stream order (marks), and their implementations on CUDA.

There are two.  A *written* mark is one call: the GPU's front end writes the mark's number into the ring, whose reader
polls it.  A *posted* mark makes a stream of our own wait for an event of the compute stream, and then run libc's
``sem_post`` on a thread of the driver.  By CUDA's rules the compute stream never waits for that function, but some GPUs
delay other streams while one runs, and with one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) all work enqueued
after it waits.  The cost of both is measured when a training starts, and the cheaper one is used.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron.fill.errors import FillError
from megatron.fill.linux.semaphore import POST_FUNCTION
from megatron.fill.pages.ring import Ring

logger = logging.getLogger("pipefill")

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_CAPTURE_NONE = 0  # CU_STREAM_CAPTURE_STATUS_NONE
_MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
_TRIED = 32  # number of marks in a measurement
_HELD_CYCLES = 4_000_000  # GPU cycles (some ms) for which the stream is held while all marks are enqueued


class Signals(Protocol):
    """Signals from the device when it reaches marks in the rank's stream."""

    def mark(self) -> None:
        """Signal the ring's reader once all work enqueued so far is done, in order; does not wait."""


class Driver:
    """The CUDA driver, for one thread of a process in which torch has initialised the device; raises FillError."""

    def __init__(self, device: str) -> None:
        import torch

        self._current_stream = torch.cuda.current_stream
        self._device = torch.device(device)
        torch.cuda.synchronize(self._device)  # makes the device's context current in this thread
        self._library = _driver()
        self._capture = ctypes.c_int()
        # Looked up once, since every mark delays the rank's own launches.
        self._is_capturing = self.bind("cuStreamIsCapturing")

    def stream(self) -> ctypes.c_void_p:
        """Return the current stream; FillError if it is being captured, since added work would break the capture."""
        stream = ctypes.c_void_p(self._current_stream(self._device).cuda_stream)
        self._is_capturing(stream, ctypes.byref(self._capture))
        if self._capture.value != _CAPTURE_NONE:
            raise FillError("the pipeline's transfers are captured in a CUDA graph, where bubbles cannot be seen")
        return stream

    def bind(self, name: str) -> Callable[..., None]:
        """Return the driver's function of that name, with a non-zero result turned into FillError."""
        function = getattr(self._library, name)

        def call(*arguments: Any) -> None:
            code = function(*arguments)
            if code:
                raise FillError(f"the CUDA driver's {name} failed with code {code}")

        return call

    def mapped(self, address: int, size: int, flags: int) -> int:
        """Map pages of the host into the GPU's memory, and return their address there."""
        self.bind("cuMemHostRegister_v2")(ctypes.c_void_p(address), ctypes.c_size_t(size), flags)
        at = ctypes.c_uint64()
        self.bind("cuMemHostGetDevicePointer_v2")(ctypes.byref(at), ctypes.c_void_p(address), 0)
        return at.value


class PostedSignals:
    """Marks that post the ring's semaphore; FillError if the driver refuses."""

    def __init__(self, device: str, ring: Ring) -> None:
        self._driver = driver = Driver(device)
        least, greatest = ctypes.c_int(), ctypes.c_int()
        driver.bind("cuCtxGetStreamPriorityRange")(ctypes.byref(least), ctypes.byref(greatest))
        # Not one of torch's streams, which come from a pool, so NCCL or an offload could get the same one.  And not
        # synchronised with the default stream, in which Megatron computes.
        self._stream = ctypes.c_void_p()
        driver.bind("cuStreamCreateWithPriority")(ctypes.byref(self._stream), _NON_BLOCKING, greatest)
        # One event is enough: a wait is for the latest record of the event before the wait was enqueued.
        self._event = ctypes.c_void_p()
        driver.bind("cuEventCreate")(ctypes.byref(self._event), _NO_TIMING)
        self._semaphore = ctypes.c_void_p(ring.semaphore)
        self._post = ctypes.c_void_p(POST_FUNCTION)
        self._record = driver.bind("cuEventRecord")
        self._wait = driver.bind("cuStreamWaitEvent")
        self._launch = driver.bind("cuLaunchHostFunc")

    def mark(self) -> None:
        stream = self._driver.stream()
        self._record(self._event, stream)
        self._wait(self._stream, self._event, 0)
        self._launch(self._stream, self._post, self._semaphore)


class WrittenSignals:
    """Marks that write their number into the ring, whose reader polls from now on; FillError if the driver refuses."""

    def __init__(self, device: str, ring: Ring) -> None:
        self._driver = driver = Driver(device)
        page, size = ring.header
        self._at = ctypes.c_uint64(driver.mapped(page, size, _MAPPED) + ring.reached - page)
        self._write = driver.bind("cuStreamWriteValue64_v2")
        self._number = 0
        ring.written = True

    def mark(self) -> None:
        self._number = number = self._number + 1
        # Without a flag the write is ordered after all earlier memory operations of the stream.
        self._write(self._driver.stream(), self._at, ctypes.c_uint64(number), 0)


def cuda_signals(device: str, ring: Ring, ways: Sequence[Callable[[str, Ring], Signals]] | None = None) -> Signals:
    """Return the kind of signals that costs the compute stream least, by a measurement of each kind (``ways``).

    The ring has no reader yet.  FillError if the driver refuses all of them.
    """
    costs: list[tuple[float, Callable[[str, Ring], Signals]]] = []
    refused = "no kind of mark is known"
    for way in ways or (WrittenSignals, PostedSignals):
        scratch = Ring()  # the relay must not see the marks of the measurement
        try:
            costs.append((stream_cost_us(device, way(device, scratch)), way))
        except FillError as error:
            refused = str(error)
    if not costs:
        raise FillError(refused)
    cost_us, chosen = min(costs, key=lambda found: found[0])
    told = ", ".join(f"{getattr(way, '__name__', way)} {us:.1f} us" for us, way in costs)
    logger.info("marks on %s cost the compute stream %.1f us each (%s)", device, cost_us, told)
    return chosen(device, ring)


def stream_cost_us(device: str, signals: Signals) -> float:
    """Return the mean time in us that a mark adds to the current stream, between enqueued minimal kernels."""
    import torch

    number = torch.zeros(1, device=device)

    def taken_ms(mark: bool) -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HELD_CYCLES)
        begun.record()
        for _ in range(_TRIED):
            number.add_(1)
            if mark:
                signals.mark()
        ended.record()
        torch.cuda.synchronize(device)
        return begun.elapsed_time(ended)

    taken_ms(True)
    extra = sorted(taken_ms(True) - taken_ms(False) for _ in range(3))
    return 1e3 * extra[1] / _TRIED


def _driver() -> ctypes.CDLL:
    # CDLL, which releases the interpreter lock: a launch may block while the stream's queue is full, and the queue may
    # hold a host function of another library that needs the lock.
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise FillError(f"the CUDA driver cannot be loaded: {error}") from error
