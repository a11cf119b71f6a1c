"""Honest small fakes of a CUDA stream: in virtual time, in real time with a thread for the GPU, and the CPU itself."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from megatron.fill.linux import semaphore

MS = 1_000_000


class VirtualStream:
    """A stream in virtual time, and the host that enqueues into it (a Signals).

    Work starts when it is enqueued and everything before it is done, as on a GPU.  The host's clock moves only by
    ``host``; the stream's only by work.  Marks are kept until ``deliver`` hands their times on, in order.
    """

    def __init__(self) -> None:
        self.host_ns = 0
        self.device_ns = 0
        self.waits: list[tuple[int, int]] = []  # from when to when the stream waited for each transfer
        self._fired: deque[int] = deque()

    def host(self, duration_ms: float) -> None:
        """The host's Python runs."""
        self.host_ns += int(duration_ms * MS)

    def compute(self, duration_ms: float) -> None:
        self.device_ns = self._ready() + int(duration_ms * MS)

    def receive(self, arrives_ns: int) -> None:
        """Wait on the stream, not on the host, for a transfer that is done at ``arrives_ns``."""
        start_ns = self._ready()
        self.device_ns = max(start_ns, arrives_ns)
        self.waits.append((start_ns, self.device_ns))

    def synchronize(self) -> None:
        self.host_ns = self._ready()

    def mark(self) -> None:
        self._fired.append(self._ready())

    def deliver(self, step: Callable[[int], None]) -> None:
        """Fire the marks so far: ``step(now_ns)`` for each."""
        while self._fired:
            step(self._fired.popleft())

    def _ready(self) -> int:
        return max(self.device_ns, self.host_ns)


class ThreadStream:
    """A stream in real time: a thread runs what is enqueued, and posts a real semaphore at marks (a Signals).

    Attributes:
        reached: the address of the word into which it writes their numbers instead; 0 for none.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.reached = 0
        self.marked_ns: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def compute(self, duration_ms: float) -> None:
        self._work.put(lambda: time.sleep(duration_ms / 1e3))

    def wait_for(self, event: threading.Event, seconds: float = 60) -> None:
        """Wait on the stream, not on the host, for what the test does; after ``seconds`` go on without it."""
        self._work.put(lambda: event.wait(seconds))

    def mark(self) -> None:
        self._work.put(self._post)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _post(self) -> None:
        self.marked_ns.append(time.monotonic_ns())
        if self.reached:
            ctypes.c_uint64.from_address(self.reached).value += 1
        else:
            semaphore.post(self._address)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class HostStream:
    """The CPU as the device: what was called before a mark is done (a Signals)."""

    def __init__(self, address: int) -> None:
        self._address = address

    def mark(self) -> None:
        semaphore.post(self._address)
