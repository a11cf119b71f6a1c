"""The edge to the GPU: a signal in stream order, and its implementation on CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

from megatron.fill.errors import FillError
from megatron.fill.linux.semaphore import POST_FUNCTION

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_CAPTURE_NONE = 0  # CU_STREAM_CAPTURE_STATUS_NONE


class Signals(Protocol):
    """What tells when the device gets to a place in the rank's stream of work."""

    def mark(self) -> None:
        """Have the ring's semaphore posted once, when all that the caller has enqueued so far is done.

        Posts come in the order of the marks.  The call does not wait.
        """


class CudaSignals:
    """Signals of a CUDA device, for one thread of a process in which torch has initialised it.

    Whatever is the current stream records an event, which is all that it has to do; a stream of our own waits for that
    and then runs libc's ``sem_post`` on a thread of the driver.  The compute never waits for a host function, and no
    Python runs in one.

    Args:
        device: such as ``cuda:0``.
        semaphore: the address of the semaphore to post.

    Raises:
        FillError: the driver refuses.
    """

    def __init__(self, device: str, semaphore: int) -> None:
        import torch

        self._current_stream = torch.cuda.current_stream
        self._device = torch.device(device)
        torch.cuda.synchronize(self._device)  # makes the device's context current in this thread
        self._driver = _driver()
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        # Not one of torch's streams: those are handed out in turn, so NCCL or an offload could get the same one.  And
        # one that does not synchronise with the default stream, which is where Megatron computes.
        self._stream = ctypes.c_void_p()
        self._call("cuStreamCreateWithPriority", ctypes.byref(self._stream), _NON_BLOCKING, greatest)
        # One event is enough: a wait is for the event as it was recorded last before the wait was enqueued.
        self._event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(self._event), _NO_TIMING)
        self._capture = ctypes.c_int()
        self._semaphore = ctypes.c_void_p(semaphore)
        self._post = ctypes.c_void_p(POST_FUNCTION)
        # Looked up once: a mark is on the way of the rank's own launches.
        self._is_capturing = self._bind("cuStreamIsCapturing")
        self._record = self._bind("cuEventRecord")
        self._wait = self._bind("cuStreamWaitEvent")
        self._launch = self._bind("cuLaunchHostFunc")

    def mark(self) -> None:
        stream = ctypes.c_void_p(self._current_stream(self._device).cuda_stream)
        self._is_capturing(stream, ctypes.byref(self._capture))
        if self._capture.value != _CAPTURE_NONE:  # an event of ours inside a capture would break it
            raise FillError("the pipeline's transfers are captured in a CUDA graph, where bubbles cannot be seen")
        self._record(self._event, stream)
        self._wait(self._stream, self._event, 0)
        self._launch(self._stream, self._post, self._semaphore)

    def _call(self, name: str, *arguments: Any) -> None:
        self._bind(name)(*arguments)

    def _bind(self, name: str) -> Callable[..., None]:
        """The driver's function of that name, which raises when the driver refuses."""
        function = getattr(self._driver, name)

        def call(*arguments: Any) -> None:
            code = function(*arguments)
            if code:
                raise FillError(f"the CUDA driver's {name} failed with code {code}")

        return call


def _driver() -> ctypes.CDLL:
    # A launch may block while the stream's queue is full, so the interpreter lock is released: the queue may hold a
    # host function of somebody else that needs it.
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise FillError(f"the CUDA driver cannot be loaded: {error}") from error
