"""A device without preemption, emulated on a CPU core: the worker's program in a training of the benchmarks.

The kernel takes the core from a worker at idle priority at any instant, so on a CPU a step that is caught by the end of
its bubble delays no rank.  A GPU does not preempt: launched kernels run to their end.  Here a worker has the lowest
real-time priority while a step is in flight, so that the training cannot interrupt it, and idle priority between steps.
A training takes this program for its workers by the variables of ``emulation``.  The sandbox leaves the job the right
to its scheduling class, and has no filter of system calls: the job, which could keep the core permanently, is trusted.

Limitations: a step takes a whole core, so work that a GPU does at the same time is not emulated; commands run as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import partial

from megatron.fill.agent.workers import PROGRAM
from megatron.fill.linux import futex, memfd
from megatron.fill.linux.libc import prctl
from megatron.fill.pages.gate import SharedGateReader
from megatron.fill.sandbox import enter, powers
from megatron.fill.sandbox.process import SandboxedProcess
from megatron.fill.worker import worker
from megatron.fill.worker.pacing import StepDevice
from megatron.fill.worker.spec import WorkerSpec

SLICE_NS = 2_000_000  # length of a turn
# Pause after each step beyond the deadline: several threads of the training need this core, the emulated device, one
# after the other until the gate is shut.  With a GPU they have cores of their own.
BREATHER_NS = 200_000
_PAGE_BYTES = 4096
_STEP, _ABOVE_STEPS, _IDLE = os.sched_param(1), os.sched_param(2), os.sched_param(0)
_LOOK_NS = 100_000_000
_PR_SET_KEEPCAPS, _CAP_SYS_NICE = 8, 1 << 23


class Emulation(StrEnum):
    """The sharing of the device between a step and the training.

    Attributes:
        COMPLETION: a step runs to its end, like kernels that fill the GPU under MPS.
        SLICES: while a step runs, it and the training take turns; the training uses its turns even while it waits, as
            NCCL's spinning kernels do.
        FREE_SLICES: the same, but in a bubble the training takes no turn, as with --fill-free-waits.
    """

    COMPLETION = "completion"
    SLICES = "slices"
    FREE_SLICES = "free-slices"

    @property
    def takes_turns(self) -> bool:
        return self is not Emulation.COMPLETION


class Launches:
    """A worker's steps, as launches on the device.

    It must be created before the worker is forked; only the thread of the worker that runs its steps may launch.
    """

    def __init__(self, how: Emulation) -> None:
        self.turns = Turns(spins=how is Emulation.SLICES) if how.takes_turns else None

    def launch(self) -> None:
        """Begin a step: only the end of a turn interrupts it from now on.

        Raises:
            PermissionError: this process may not have a real-time priority.
        """
        os.sched_setscheduler(0, os.SCHED_FIFO, _STEP)
        if self.turns is not None:
            self.turns.begin()

    def land(self) -> None:
        """End the step: return to idle priority."""
        if self.turns is not None:
            self.turns.end()
        os.sched_setscheduler(0, os.SCHED_IDLE, _IDLE)


class Turns:
    """The turns that a worker's steps and the training take, by a page with a count that is odd during a step.

    Args:
        spins: True if the training takes turns in bubbles too.
    """

    def __init__(self, spins: bool) -> None:
        self._spins = spins
        fd = memfd.create("turns", _PAGE_BYTES)
        _, self._address = memfd.map_page(fd, _PAGE_BYTES, writable=True)
        os.close(fd)  # it stays mapped
        self._word = ctypes.c_uint32.from_address(self._address)
        self._wake = futex.Waker(self._address, futex.ALL)

    def begin(self) -> None:
        """Record the beginning of a step."""
        self._tell()

    def end(self) -> None:
        """Record the end of a step."""
        self._tell()

    def _tell(self) -> None:
        self._word.value = (self._word.value + 1) & 0xFFFFFFFF
        self._wake()

    @property
    def count(self) -> int:
        """The number of beginnings and ends of steps; odd while a step is in flight."""
        return self._word.value

    def serve(self, pid: int, cpus: list[int], over: Callable[[], bool], waits: Callable[[], bool]) -> None:
        """Stop the worker for every second turn of its steps, from outside of its sandbox, until ``over`` returns True.

        Args:
            pid: pid of the worker.
            cpus: cores of the rank.
            over: returns True if the worker has ended; called only if nothing has happened for a while.
            waits: returns True if the training is in a bubble now.

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
        """Wait until the count differs from ``seen``, for at most ``timeout_ns``; return the count."""
        futex.wait(self._address, seen, timeout_ns)
        return self.count

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class EmulatedWorker(worker.Worker):
    """Runs one task on the emulated device, or a command as ever."""

    def __init__(self, how: Emulation, spec: WorkerSpec, log_fd: int, channel: socket.socket) -> None:
        if spec.device != "cpu":
            sys.exit(f"the device is {spec.device}: only a CPU can be one that does not preempt")
        keep_the_class()
        super().__init__(replace(spec, sandbox=replace(spec.sandbox, without=("system calls",))), log_fd, channel)
        self._launches = Launches(how)

    def device(self) -> StepDevice:
        return StepDevice(self._launches.launch, land=self._land)

    def wait(self, process: SandboxedProcess) -> int:
        turns = self._launches.turns
        if turns is not None:
            turns.serve(process.pid, self.spec.cpus, lambda: process.poll() is not None, lambda: not self.gate.shut)
        return process.wait()

    def _land(self) -> None:
        self._launches.land()
        breathe(self.gate)


def breathe(gate: SharedGateReader) -> None:
    """Beyond the deadline, leave the core to the training for a moment, which ends with the bubble."""
    bubble = gate.current()
    if bubble is not None and time.monotonic_ns() > bubble.deadline_ns:
        gate.wait_change(bubble.seq, BREATHER_NS)


def keep_the_class() -> None:
    """Have the sandboxes of this process leave their jobs the right to choose a scheduling class, but no program."""

    def become(uid: int, gid: int) -> None:
        prctl(_PR_SET_KEEPCAPS, 1)
        powers.become(uid, gid)

    def give_up_powers() -> str:
        powers.keep_powers(_CAP_SYS_NICE)
        return ""

    for step in (become, give_up_powers):
        getattr(enter, step.__name__)  # AttributeError: it was renamed
        setattr(enter, step.__name__, step)


def emulation(how: Emulation) -> dict[str, str]:
    """The variables of a training whose jobs are to use the emulated device."""
    return {PROGRAM: f"scripts.benchmarks.emulated {how}"}


def main(how: str, parent: str, channel_fd: str, ahead: str, run_dir: str) -> None:
    """Run the worker's first process."""
    worker.main(parent, channel_fd, ahead, run_dir, partial(EmulatedWorker, Emulation(how)))


def why_not() -> str:
    """The reason why this process cannot emulate the device; empty if it can."""
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
