"""Work that is one long run instead of steps (FreeRide's imperative interface): a class, or any command."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, Protocol

from megatron.fill.sidetask.base import SideTask

NOT_FOUND = 127  # the exit status of shells for that
_STILL = set("TtZX")  # the kernel's letters for what is stopped or has ended
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores; a batch system's notices stay ignored


_IN_FLIGHT = 2  # calls of ``synchronize`` whose kernels may be queued on a GPU


class ImperativeTask(SideTask):
    """A side task that does its work in one call (FreeRide, section 4: the imperative interface).

    Subclass it and override ``run_gpu_workload``; override the rest as needed.  All callbacks are called in this order,
    from the main thread of a process that is the task's own:

        create(**args) -> init() -> start() -> run_gpu_workload() -> stop()

    When the bubble is about to end, the workload is interrupted between two of its Python instructions: ``pause`` is
    called there, the device is waited for, and the thread waits until the next bubble, where ``start`` is called.
    Other threads and processes that it has started go on.  A long call into C, or a long queue of kernels, delays the
    pause, as a long step does: the runtime plans for as long as the last pause took, and what is beyond the grace is
    stopped.  So a workload calls ``synchronize`` every few milliseconds.

    It has no ``state_dict``: in another run it begins again, with what it has left in its folder.

    Attributes:
        unit: ``seconds`` for the time in which it ran; else the sum of what ``synchronize`` was told.
    """

    unit: ClassVar[str] = "seconds"
    count: Callable[[float], None] = staticmethod(lambda work: None)  # the runtime's

    def run_gpu_workload(self) -> None:
        """Do all of it; the job has succeeded when this returns."""
        raise NotImplementedError(f"{type(self).__name__} does not override run_gpu_workload()")

    def synchronize(self, work: float = 0.0) -> None:
        """Count work, and wait until what was launched on the device before the last call but one has ended.

        So a pause waits for the kernels of two stretches between such calls at most, and not for a queue of a thousand.
        """
        if self.context.device != "cpu":
            import torch

            events: list[Any] = self.__dict__.setdefault("_launched", [])  # a subclass need not call our __init__
            events.append(torch.cuda.Event())
            events[-1].record()
            if len(events) > _IN_FLIGHT:
                events.pop(0).synchronize()
        if work:
            self.count(work)


class ProcessGroup(Protocol):
    """A process group that its holder can signal and wait for."""

    @property
    def state(self) -> str: ...

    def signal(self, number: signal.Signals) -> None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class StoppedCommand:
    """A command that starts out stopped.

    Args:
        held: it, about to stop itself.
    """

    def __init__(self, held: ProcessGroup) -> None:
        self._held = held

    @property
    def exit_code(self) -> int | None:
        """The exit code once the command is done: negative for a signal, as in ``subprocess``; None before."""
        return self._held.poll()

    def resume(self) -> None:
        self._held.signal(signal.SIGCONT)

    def pause(self) -> None:
        self._held.signal(signal.SIGSTOP)

    def await_stop(self, within_s: float, every_s: float = 0.0001) -> bool:
        """Return once the command's own process has stopped or ended, or after so long; whether it has."""
        end_s = time.monotonic() + within_s
        while self._held.state not in _STILL:
            if time.monotonic() >= end_s:
                return False
            time.sleep(every_s)
        return True

    def kill(self) -> None:
        """End the command with all that it has started, and reap it."""
        self._held.kill()


def become_command(command: Sequence[str]) -> NoReturn:
    """Stop, and once continued become ``command``, or end with 127 if there is no such program."""
    program = shutil.which(command[0])
    if program is None:
        os.write(2, f"command not found: {command[0]}\n".encode())
        os._exit(NOT_FOUND)
    for number in _RESTORED:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        os.execv(program, list(command))
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
    os._exit(126)
