"""Any command as a side task: stopped and continued as a process group (FreeRide's imperative interface)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.fill.errors import TaskError


class StoppedCommand:
    """A command in a process group of its own, which starts out stopped.

    Args:
        command: program and arguments.
        directory: its working directory.
        prepare: called in the child before the command takes over (priority, limits).

    Raises:
        TaskError: there is no such program.
    """

    def __init__(self, command: Sequence[str], directory: Path, prepare: Callable[[], None]) -> None:
        program = shutil.which(command[0])
        if program is None:
            raise TaskError(f"command not found: {command[0]}")
        self.exit_code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                prepare()
                os.chdir(directory)
                os.kill(os.getpid(), signal.SIGSTOP)
                os.execv(program, list(command))
            except BaseException as error:
                os.write(2, f"{command[0]}: {error}\n".encode())
            finally:
                os._exit(127)
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def poll(self) -> int | None:
        """The exit code once the command is done: negative for a signal, as in ``subprocess``; None before."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code

    def kill(self) -> None:
        """End the whole process group and reap the command."""
        self._signal(signal.SIGKILL)
        if self.exit_code is None:
            _, status = os.waitpid(self.pid, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone
            os.killpg(self.pid, number)
