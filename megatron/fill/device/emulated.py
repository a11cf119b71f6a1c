"""A device that does not preempt, emulated on a core of the CPU, for benchmarks and tests.

From a worker at idle priority the kernel takes the core back at any instant, so that on a CPU a step that is caught by
the end of its bubble holds nobody up.  A GPU does not preempt: what was launched runs on.  Here a worker takes the
lowest real-time priority while a step is in flight, so that the main job cannot interrupt it; between steps it is at
idle priority.  Its cage lets it (``Cage.real_time``), and it trusts it: such a worker can keep the core for good.

What it is not: a step keeps one core, so what a GPU does beside it at the same time is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from enum import StrEnum

from megatron.fill.linux import futex, memfd

SLICE_NS = 2_000_000  # how long a turn is
# The main job waits on the core that is the device here: several of its threads need it, one after the other, until the
# gate is shut.  On a GPU they have cores of their own.
BREATHER_NS = 200_000
_PAGE_BYTES = 4096
_STEP, _ABOVE_STEPS, _IDLE = os.sched_param(1), os.sched_param(2), os.sched_param(0)
_LOOK_NS = 100_000_000


class Emulation(StrEnum):
    """How a step and the main job share the device.

    Attributes:
        COMPLETION: what was launched runs to its end, as kernels do that fill the GPU under MPS.
        SLICES: while a step runs, it and the main job take turns, and the main job keeps its turn also when it only
            waits, as NCCL's kernels do that spin.
        FREE_SLICES: the same, but in a bubble the main job needs no turn, as with --fill-free-waits.
    """

    COMPLETION = "completion"
    SLICES = "slices"
    FREE_SLICES = "free-slices"

    @property
    def takes_turns(self) -> bool:
        return self is not Emulation.COMPLETION


class Launches:
    """A worker's steps, as launches on the device.

    To be made before the worker is forked; only the worker's one thread that runs its steps may launch.
    """

    def __init__(self, how: Emulation) -> None:
        self.turns = Turns(spins=how is Emulation.SLICES) if how.takes_turns else None

    def launch(self) -> None:
        """A step begins: nothing but a turn's end interrupts it from now on.

        Raises:
            PermissionError: this process may not have a real-time priority.
        """
        os.sched_setscheduler(0, os.SCHED_FIFO, _STEP)
        if self.turns is not None:
            self.turns.begin()

    def land(self) -> None:
        """The step has ended."""
        if self.turns is not None:
            self.turns.end()
        os.sched_setscheduler(0, os.SCHED_IDLE, _IDLE)


class Turns:
    """The turns that a worker's steps and the main job take: a page with a count that is odd during a step.

    Args:
        spins: the main job takes its turns in bubbles too.
    """

    def __init__(self, spins: bool) -> None:
        self._spins = spins
        fd = memfd.create("turns", _PAGE_BYTES)
        _, self._address = memfd.map_page(fd, _PAGE_BYTES, writable=True)
        os.close(fd)  # it stays mapped
        self._word = ctypes.c_uint32.from_address(self._address)
        self._wake = futex.Waker(self._address, futex.ALL)

    def begin(self) -> None:
        """A step begins."""
        self._tell()

    def end(self) -> None:
        """It has ended."""
        self._tell()

    def _tell(self) -> None:
        self._word.value = (self._word.value + 1) & 0xFFFFFFFF
        self._wake()

    @property
    def count(self) -> int:
        """Odd while a step is in flight."""
        return self._word.value

    def serve(self, pid: int, cpus: list[int], over: Callable[[], bool], waits: Callable[[], bool]) -> None:
        """Stop the worker for every second turn of its steps, from outside of its cage, until it is over.

        Args:
            pid: the worker's process.
            cpus: the rank's cores.
            over: asked only when nothing has happened for a while.
            waits: whether the main job is in a bubble now.

        Raises:
            PermissionError: this process may not have a real-time priority.
        """
        if cpus:
            os.sched_setaffinity(0, cpus)
        os.sched_setscheduler(0, os.SCHED_FIFO, _ABOVE_STEPS)
        count = 0
        while True:
            in_flight = count % 2 == 1
            seen = self._wait(count, SLICE_NS if in_flight else _LOOK_NS)
            if seen != count:
                count = seen
            elif over():
                return
            elif in_flight and (self._spins or not waits()):
                self._signal(pid, signal.SIGSTOP)
                time.sleep(SLICE_NS / 1e9)
                self._signal(pid, signal.SIGCONT)

    def _wait(self, seen: int, timeout_ns: int) -> int:
        """The count once it is another one than ``seen``, or after so long."""
        futex.wait(self._address, seen, timeout_ns)
        return self.count

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def why_not() -> str:
    """Why this process cannot emulate such a device; empty if it can."""
    child = os.fork()
    if child == 0:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, _ABOVE_STEPS)
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        return "real-time priorities are refused here; it takes root or CAP_SYS_NICE"
    return ""
