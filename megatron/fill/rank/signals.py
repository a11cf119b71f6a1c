"""The edge to the GPU: a signal in stream order, and its implementations on CUDA.

There are two.  A *written* mark is one call: the GPU's front end writes the mark's number into the ring, whose reader
looks there again and again.  A *posted* mark has a stream of our own wait for an event of the compute's, and then run
libc's ``sem_post`` on a thread of the driver.  The compute never waits for that function by CUDA's rules, but some GPUs
hold up other streams while one runs, and with one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) everything that is
enqueued after it waits.  Which of the two costs the compute less is measured when a training starts.
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
_TRIED = 32  # marks
_keep: list[Ring] = []  # those that the driver knows of: their memory stays where it is
_HELD_CYCLES = 4_000_000  # some ms, in which all of them are enqueued


class Signals(Protocol):
    """What tells when the device gets to a place in the rank's stream of work."""

    def mark(self) -> None:
        """Have the ring's reader told once, when all that the caller has enqueued so far is done.

        Marks are told in their order.  The call does not wait.
        """


class Driver:
    """The CUDA driver, for one thread of a process in which torch has initialised the device.

    Raises:
        FillError: the driver refuses.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._current_stream = torch.cuda.current_stream
        self._device = torch.device(device)
        torch.cuda.synchronize(self._device)  # makes the device's context current in this thread
        self._library = _driver()
        self._capture = ctypes.c_int()
        # Looked up once: a mark is on the way of the rank's own launches.
        self._is_capturing = self.bind("cuStreamIsCapturing")

    def stream(self) -> ctypes.c_void_p:
        """Whatever is the current stream.

        Raises:
            FillError: it is being captured, and anything of ours inside a capture would break that.
        """
        stream = ctypes.c_void_p(self._current_stream(self._device).cuda_stream)
        self._is_capturing(stream, ctypes.byref(self._capture))
        if self._capture.value != _CAPTURE_NONE:
            raise FillError("the pipeline's transfers are captured in a CUDA graph, where bubbles cannot be seen")
        return stream

    def bind(self, name: str) -> Callable[..., None]:
        """The driver's function of that name, which raises when the driver refuses."""
        function = getattr(self._library, name)

        def call(*arguments: Any) -> None:
            code = function(*arguments)
            if code:
                raise FillError(f"the CUDA driver's {name} failed with code {code}")

        return call


class PostedSignals:
    """Marks that post the ring's semaphore.

    Args:
        device: such as ``cuda:0``.

    Raises:
        FillError: the driver refuses.
    """

    def __init__(self, device: str, ring: Ring) -> None:
        self._driver = driver = Driver(device)
        least, greatest = ctypes.c_int(), ctypes.c_int()
        driver.bind("cuCtxGetStreamPriorityRange")(ctypes.byref(least), ctypes.byref(greatest))
        # Not one of torch's streams: those are handed out in turn, so NCCL or an offload could get the same one.  And
        # one that does not synchronise with the default stream, which is where Megatron computes.
        self._stream = ctypes.c_void_p()
        driver.bind("cuStreamCreateWithPriority")(ctypes.byref(self._stream), _NON_BLOCKING, greatest)
        # One event is enough: a wait is for the event as it was recorded last before the wait was enqueued.
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
    """Marks that write their number into the ring.

    Args:
        device: such as ``cuda:0``.
        ring: its reader looks for numbers from now on.

    Raises:
        FillError: the driver refuses.
    """

    def __init__(self, device: str, ring: Ring) -> None:
        self._driver = driver = Driver(device)
        page, size = ring.header
        driver.bind("cuMemHostRegister_v2")(ctypes.c_void_p(page), ctypes.c_size_t(size), _MAPPED)
        at = ctypes.c_uint64()
        driver.bind("cuMemHostGetDevicePointer_v2")(ctypes.byref(at), ctypes.c_void_p(page), 0)
        self._at = ctypes.c_uint64(at.value + ring.reached - page)
        self._write = driver.bind("cuStreamWriteValue64_v2")
        self._number = 0
        ring.written = True

    def mark(self) -> None:
        self._number = number = self._number + 1
        # Without a flag the write is behind all memory operations that the stream did before.
        self._write(self._driver.stream(), self._at, ctypes.c_uint64(number), 0)


def cuda_signals(device: str, ring: Ring, ways: Sequence[Callable[[str, Ring], Signals]] | None = None) -> Signals:
    """The signals that cost the compute stream least, as a few of each show.

    Args:
        device: such as ``cuda:0``.
        ring: not read by anybody yet.
        ways: the kinds to choose from; None for all.

    Raises:
        FillError: the driver refuses all of them.
    """
    costs: list[tuple[float, Callable[[str, Ring], Signals]]] = []
    refused = "no kind of mark is known"
    for way in ways or (WrittenSignals, PostedSignals):
        scratch = Ring()  # what is tried is not for the relay
        _keep.append(scratch)
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
    """What a mark adds to the current stream, on average, between smallest kernels that are enqueued already."""
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
    # A launch may block while the stream's queue is full, so the interpreter lock is released: the queue may hold a
    # host function of somebody else that needs it.
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise FillError(f"the CUDA driver cannot be loaded: {error}") from error
