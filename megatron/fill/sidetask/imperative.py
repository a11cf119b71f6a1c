"""Any command as a side task: stopped and continued as a process group (FreeRide's imperative interface)."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from typing import NoReturn, Protocol

NOT_FOUND = 127  # the exit status of shells for that
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores; a batch system's notices stay ignored


class Held(Protocol):
    """A process group that its holder can signal and wait for."""

    def signal(self, number: signal.Signals) -> None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class StoppedCommand:
    """A command that starts out stopped.

    Args:
        held: it, about to stop itself.
    """

    def __init__(self, held: Held) -> None:
        self._held = held

    @property
    def exit_code(self) -> int | None:
        """The exit code once the command is done: negative for a signal, as in ``subprocess``; None before."""
        return self._held.poll()

    def resume(self) -> None:
        self._held.signal(signal.SIGCONT)

    def pause(self) -> None:
        self._held.signal(signal.SIGSTOP)

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
