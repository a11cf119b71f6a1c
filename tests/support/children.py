"""Processes of a test's own, for what only shows between processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


class Child:
    """A process of ours that runs a function with the write end of a pipe, and is gone at the end."""

    def __init__(self, body: Callable[[int], None]) -> None:
        self.out, end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.out)
                body(end)
            except BaseException as error:
                os.write(2, f"{error!r}\n".encode())
            finally:
                os._exit(0)
        os.close(end)

    def read(self) -> bytes:
        with open(self.out, "rb", closefd=False) as file:
            return file.read()

    def kill(self) -> None:
        """Return when it has ended: its locks are gone then."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # ``end`` reaps it

    def end(self) -> None:
        os.close(self.out)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
