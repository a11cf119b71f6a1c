"""How a ghost makes its rank wait: as NCCL does, on a stream of the GPU, or as a host does that copies data in."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

_STREAMS = 8  # more than transfers are pending at a time, of which each has its own stream
# By the global timer, which runs at one rate: the clock of the multiprocessors falls when jobs have the GPU draw power,
# and what counts its cycles would wait longer in just those iterations.
KERNEL = """
extern "C" __global__ void wait_for(double duration_ns) {
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begun < (unsigned long long)duration_ns);
}
"""
KERNEL_NAME = "wait_for"


class GhostRequest(Protocol):
    """A transfer that is under way."""

    def wait(self) -> None:
        """Wait as the owner of a transfer's request does."""


class Waits(Protocol):
    """One way to wait."""

    def prepare(self) -> None:
        """Called before the first wait; all that the device was given so far is done then."""

    def start(self, duration_ns: int, arrive: Callable[[], None]) -> GhostRequest:
        """Begin a transfer that is over in so long, when ``arrive`` writes what was received."""


class HostWaits:
    """As gloo over host memory: the device has nothing to do, and the host sleeps."""

    def prepare(self) -> None:
        import torch

        torch.cuda.synchronize()

    def start(self, duration_ns: int, arrive: Callable[[], None]) -> GhostRequest:
        import torch

        torch.cuda.synchronize()  # what is sent is copied to the host first
        return _HostRequest(time.monotonic_ns() + duration_ns, arrive)


class _HostRequest:
    def __init__(self, until_ns: int, arrive: Callable[[], None]) -> None:
        self._until_ns = until_ns
        self._arrive: Callable[[], None] | None = arrive

    def wait(self) -> None:
        import torch

        arrive, self._arrive = self._arrive, None
        if arrive is None:
            return
        torch.cuda.synchronize()
        left_ns = self._until_ns - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)
        arrive()


class StreamWaits:
    """As NCCL: a kernel of one block spins on a stream of its own, and the compute waits for it in stream order."""

    def __init__(self) -> None:
        self._streams: Iterator[Any] | None = None  # they take a context, for which Megatron has to choose the device
        self._kernel: Callable[..., None] | None = None

    def prepare(self) -> None:
        import torch

        self._kernel = torch.cuda._compile_kernel(KERNEL, KERNEL_NAME)
        self._kernel(args=[0.0])  # loaded now, and not within an iteration
        torch.cuda.synchronize()

    def start(self, duration_ns: int, arrive: Callable[[], None]) -> GhostRequest:
        import torch

        assert self._kernel is not None
        if self._streams is None:
            self._streams = itertools.cycle([torch.cuda.Stream() for _ in range(_STREAMS)])
        stream = next(self._streams)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if duration_ns:
                self._kernel(args=[float(duration_ns)])
            arrive()
        return _StreamRequest(stream.record_event())


class _StreamRequest:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        import torch

        torch.cuda.current_stream().wait_event(self._event)
