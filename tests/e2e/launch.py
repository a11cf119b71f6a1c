"""Starts the ranks of a training as torchrun does, each in a session of its own, without importing torch itself.

    python launch.py RANKS PYTHON_ARGUMENTS...

With PIPEFILL_TEST_WARM or PIPEFILL_TEST_FRESH in the environment, the ranks are forked by who listens there
(``warm.py``): one that has imported Megatron, or has not.  When a rank fails the others are ended, and its exit code is
returned.  SIGABRT is passed on to all of them: a warm rank then prints where each of its threads is.  With 0 for RANKS
this process stands for one warm Python, whose environment is its own.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from megatron.fill.linux.ports import free_port

WARM, FRESH = "PIPEFILL_TEST_WARM", "PIPEFILL_TEST_FRESH"


class Cold:
    """A rank in a Python of its own."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen([sys.executable, "-u", *arguments], env=environment, start_new_session=True)
        self.pid = self._process.pid
        self._ended = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        """Readable once it has ended."""
        return self._ended

    def wait(self) -> int:
        return self._process.wait()


class Warm:
    """A Python that another process forks; its output goes to two descriptors."""

    def __init__(
        self, arguments: list[str], environment: dict[str, str], where: str, output: tuple[int, int] = (1, 2)
    ) -> None:
        while not Path(where).exists():
            time.sleep(0.05)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(where)
        request = json.dumps({"argv": arguments, "env": environment, "cwd": os.getcwd()}).encode() + b"\n"
        descriptors = array.array("i", output).tobytes()
        sent = self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        self._socket.sendall(request[sent:])
        self._answers = self._socket.makefile()
        self.pid = int(self._answers.readline())
        self._code: int | None = None

    def fileno(self) -> int:
        """Readable once it has ended."""
        return self._socket.fileno()

    def wait(self) -> int:
        if self._code is None:
            self._code = int(self._answers.readline() or 1)
        return self._code


def one(arguments: list[str]) -> int:
    """Stand for a warm Python: end when it ends, and pass on that it is to end."""
    python = Warm(arguments, dict(os.environ), os.environ[WARM])
    signal.signal(signal.SIGTERM, lambda *_: os.kill(python.pid, signal.SIGTERM))
    return python.wait()


def main() -> int:
    ranks = int(sys.argv[1])
    if not ranks:
        return one(sys.argv[2:])
    where = os.environ.get(WARM) or os.environ.get(FRESH)
    running: list[Cold | Warm] = []
    with free_port() as port:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        for rank in range(ranks):
            own = {"LOCAL_WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment = dict(os.environ) | shared | own
            running.append(Warm(sys.argv[2:], environment, where) if where else Cold(sys.argv[2:], environment))
        signal.signal(signal.SIGABRT, lambda number, _: send(number, running))
        while running:
            for ended in select.select(running, [], [])[0]:
                running.remove(ended)
                if code := ended.wait():
                    send(signal.SIGTERM, running)
                    return code
    return 0


def send(number: int, ranks: list[Cold | Warm]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, number)


if __name__ == "__main__":
    sys.exit(main())
