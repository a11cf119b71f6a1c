"""Tasks that do all work in a single call (FreeRide's imperative interface): a class, or any command."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

from megatron.fill.sidetask.base import SideTask

NOT_FOUND = 127  # exit status of shells for a missing program
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)  # ignored by Python; a batch system's signals stay ignored
_IN_FLIGHT = 2  # number of ``synchronize`` calls whose kernels may be queued on a GPU


class ImperativeTask(SideTask):
    """A side task that does its work in a single call (FreeRide, section 4: the imperative interface).

    Subclass it and override ``run_gpu_workload``; override the rest as needed.  All callbacks are called in this order,
    from the main thread of the task's own process:

        create(**args) -> init() -> start() -> run_gpu_workload() -> stop()

    When the bubble is about to end, the workload is interrupted between two of its Python instructions: ``pause`` is
    called there, kernels on the device are waited for, and the thread waits until the next bubble, in which ``start``
    is called.  Other threads and processes that it has started continue.  A long call into C, or a long queue of
    kernels, delays the pause, as a long step does: the runtime plans for the duration of the last pause, and stops a
    task that exceeds the grace period.  So a workload should call ``synchronize`` every few milliseconds.

    It has no ``state_dict``: in another run it starts again, with the files that it has left in its folder.

    Attributes:
        unit: ``seconds`` to count the time in which it ran; another unit to count the work given to ``synchronize``.
        count: function that counts work, set by the runtime.
    """

    unit: ClassVar[str] = "seconds"
    count: Callable[[float], None] = staticmethod(lambda work: None)  # the runtime's

    def run_gpu_workload(self) -> None:
        """Do all work; the job has succeeded when this returns."""
        raise NotImplementedError(f"{type(self).__name__} does not override run_gpu_workload()")

    def synchronize(self, work: float = 0.0) -> None:
        """Count work, and wait until all kernels launched before the last call but one have ended.

        So a pause waits at most for the kernels launched since the third last call, not for a queue of a thousand.
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


def why_no_program(program: str) -> str:
    """Return the reason why ``shutil.which`` finds no such program."""
    there = os.path.dirname(program) and os.path.exists(program)
    return f"not an executable file: {program}" if there else f"command not found: {program}"


def become_command(command: Sequence[str]) -> NoReturn:
    """Stop this process, and once continued replace it by ``command``; exit with 127 if the program is missing."""
    program = shutil.which(command[0])
    if program is None:
        os.write(2, f"{why_no_program(command[0])}\n".encode())
        os._exit(NOT_FOUND)
    for number in _RESTORED:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        os.execv(program, list(command))
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
    os._exit(126)
