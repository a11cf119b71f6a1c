"""A device that does not preempt, emulated on a core of the CPU, for benchmarks and tests.

From a worker at idle priority the kernel takes the core back at any instant, so that on a CPU a step that is caught by
the end of its bubble holds nobody up.  A GPU does not preempt: what was launched runs on.  Here a worker says when its
step begins and when it has ended, and an executor in the process that holds it, outside of its cage, sees to it that
the main job cannot interrupt the step, by the real-time class of Linux.  Between steps the worker is at idle priority.

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

from megatron.fill import futex, shared

SLICE_NS = 2_000_000  # how long a turn is
# The main job waits on the core that is the device here: several of its threads need it, one after the other, until the
# gate is shut.  On a GPU they have cores of their own.
BREATHER_NS = 200_000
_PAGE_BYTES = 4096
_STEP, _EXECUTOR, _IDLE = os.sched_param(1), os.sched_param(2), os.sched_param(0)
_LOOK_NS = 100_000_000


class Emulation(StrEnum):
    """How a step and the main job share the device.

    Attributes:
        COMPLETION: what was launched runs to its end, as kernels do that fill the GPU under MPS.
        SLICES: while a step runs, it and the main job take turns, and the main job keeps its turn also when it only
            waits, as NCCL's kernels do that spin.
    """

    COMPLETION = "completion"
    SLICES = "slices"


class LaunchPage:
    """What a worker says to the executor: a count that is odd while a step is in flight.

    To be made before the worker is forked: both have it then.
    """

    def __init__(self) -> None:
        fd = shared.create("launches", _PAGE_BYTES)
        _, self._address = shared.map_page(fd, _PAGE_BYTES, writable=True)
        os.close(fd)  # it stays mapped
        self._word = ctypes.c_uint32.from_address(self._address)
        self._wake = futex.Waker(self._address)

    def launch(self) -> None:
        """The worker begins a step; it goes on as what cannot be interrupted."""
        self._tell(1)

    def land(self) -> None:
        """The worker's step has ended, or there was none."""
        self._tell(0)

    def _tell(self, parity: int) -> None:
        count = self._word.value
        if count % 2 != parity:
            self._word.value = (count + 1) & 0xFFFFFFFF
            self._wake()

    @property
    def count(self) -> int:
        """Odd while a step is in flight."""
        return self._word.value

    def wait(self, seen: int, timeout_ns: int) -> int:
        """The count once it is another one than ``seen``, or after so long."""
        futex.wait(self._address, seen, timeout_ns)
        return self.count


class Executor:
    """Runs one worker's steps as a device that does not preempt would.

    Args:
        pid: the worker's process.
        cpus: the rank's cores.
    """

    def __init__(self, page: LaunchPage, pid: int, cpus: list[int], how: Emulation) -> None:
        self._page = page
        self._pid = pid
        self._cpus = cpus
        self._how = how

    def serve(self, over: Callable[[], bool]) -> None:
        """Serve until it is over, which is asked only when nothing has happened for a while.

        Raises:
            PermissionError: this process may not have a real-time priority.
        """
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)
        os.sched_setscheduler(0, os.SCHED_FIFO, _EXECUTOR)
        count = 0
        while True:
            seen = self._page.wait(count, _LOOK_NS)
            if seen == count and over():
                return
            count = seen
            while count % 2:  # the next step may have begun already
                ended = self._run_step(count, over)
                if ended == count:
                    return
                count = ended

    def _run_step(self, launched: int, over: Callable[[], bool]) -> int:
        """From a launch to its end; the count then, which is the same if it is over instead."""
        self._schedule(os.SCHED_FIFO, _STEP)
        try:
            turn_ns = _LOOK_NS if self._how is Emulation.COMPLETION else SLICE_NS
            while (count := self._page.wait(launched, turn_ns)) == launched:
                if over():
                    return launched
                if self._how is Emulation.SLICES:
                    self._signal(signal.SIGSTOP)
                    time.sleep(SLICE_NS / 1e9)
                    self._signal(signal.SIGCONT)
        finally:
            self._schedule(os.SCHED_IDLE, _IDLE)
        return count

    def _schedule(self, policy: int, param: os.sched_param) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(self._pid, policy, param)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)


def why_not() -> str:
    """Why this process cannot emulate such a device; empty if it can."""
    child = os.fork()
    if child == 0:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, _EXECUTOR)
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        return "real-time priorities are refused here; it takes root or CAP_SYS_NICE"
    return ""
