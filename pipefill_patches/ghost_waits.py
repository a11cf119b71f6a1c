"""Waits for ghost stages: on a stream of the GPU, as with NCCL, or on the host, as with gloo."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

_STREAMS = 8  # more than the number of transfers pending at a time, each of which has its own stream
# The kernel reads the global timer, which has a constant rate.  The multiprocessors' clock falls when jobs draw power,
# so a kernel that counts its cycles would wait longer in just those iterations.
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


class HostWaits:
    """Waits as with gloo over host memory: the device is idle, and the host sleeps."""

    def prepare(self) -> None:
        """Prepare for the first wait; all work that was submitted to the device before is done on return."""
        import torch

        torch.cuda.synchronize()

    def start(self, duration_ns: int, arrive: Callable[[], None]) -> _HostRequest:
        """Begin a transfer that takes ``duration_ns``, and then calls ``arrive`` to write the received values."""
        import torch

        torch.cuda.synchronize()  # data to send would be copied to the host first
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
    """Waits as with NCCL: a kernel of one block spins on a separate stream, and the compute stream waits for it."""

    def __init__(self) -> None:
        self._streams: Iterator[Any] | None = None  # created late: they need a context on the device Megatron chooses
        self._kernel: Callable[..., None] | None = None

    def prepare(self) -> None:
        import torch

        self._kernel = torch.cuda._compile_kernel(KERNEL, KERNEL_NAME)
        self._kernel(args=[0.0])  # load it now instead of within an iteration
        torch.cuda.synchronize()

    def start(self, duration_ns: int, arrive: Callable[[], None]) -> _StreamRequest:
        import torch

        if self._streams is None:
            self._streams = itertools.cycle([torch.cuda.Stream() for _ in range(_STREAMS)])
        stream = next(self._streams)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if duration_ns:  # not in the first iterations, before ``prepare``
                assert self._kernel is not None
                self._kernel(args=[float(duration_ns)])
            arrive()
        return _StreamRequest(stream.record_event())


class _StreamRequest:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        import torch

        torch.cuda.current_stream().wait_event(self._event)


type GhostRequest = _HostRequest | _StreamRequest  # a transfer in progress
