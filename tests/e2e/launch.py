"""Starts the ranks of a training as torchrun does, each in a session of its own, without importing torch itself.

    python launch.py RANKS PYTHON_ARGUMENTS...

With PIPEFILL_TEST_WARM or PIPEFILL_TEST_FRESH in the environment, the ranks are forked by who listens there
(``warm.py``): one that has imported Megatron, or has not.  When a rank fails the others are ended, and its exit code is
returned.  SIGABRT is passed on to all of them: a warm rank then prints where each of its threads is.  With 0 for RANKS
this process stands for one warm Python, whose environment and standard input are its own, and with ``fresh`` for one
that has not imported Megatron.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.fill.linux.wakeup import readable
from scripts.benchmarks.one_gpu import free_port
from tests.e2e.warm import take_terminal

WARM, FRESH = "PIPEFILL_TEST_WARM", "PIPEFILL_TEST_FRESH"
_IMPORTS_S = 120.0  # for so long a process may import before it listens


class Cold:
    """A Python that is started; as ``Warm``."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: tuple[int, int] = (1, 2),
        directory: Path | None = None,
        terminal: bool = False,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", *arguments],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output[0],
            stderr=output[1],
            env=environment,
            start_new_session=True,
            preexec_fn=take_terminal if terminal else None,
        )
        self.pid = self._process.pid
        self._ended = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        """Readable once it has ended."""
        return self._ended

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self) -> int:
        return self._process.wait()


class Warm:
    """A Python that another process forks, in the namespaces of this one.

    Args:
        where: socket of that process.
        output: descriptors of its standard output and error, and of its standard input if it has one.
        directory: its working folder; by default that of this process.
        terminal: its output is a terminal of its own.

    Raises:
        TimeoutError: nobody listens there, and nobody begins to.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        where: str,
        output: Sequence[int] = (1, 2),
        directory: Path | None = None,
        terminal: bool = False,
    ) -> None:
        latest_s = time.monotonic() + _IMPORTS_S
        while not Path(where).exists():
            if time.monotonic() > latest_s:
                raise TimeoutError(f"nobody listens at {where}")
            time.sleep(0.05)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(where)
        asked = {
            "argv": list(arguments),
            "env": dict(environment),
            "cwd": str(directory or os.getcwd()),
            "terminal": terminal,
        }
        request = json.dumps(asked).encode() + b"\n"
        descriptors = array.array("i", output).tobytes()
        sent = self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        if sent < len(request):  # else the child may have ended by now, and nothing can be sent any more
            self._socket.sendall(request[sent:])
        self._answers = self._socket.makefile()
        self.pid = int(self._answers.readline())
        self._code: int | None = None

    def fileno(self) -> int:
        """Readable once it has ended."""
        return self._socket.fileno()

    def poll(self) -> int | None:
        ended = self._code is not None or readable(0, self.fileno())
        return self.wait() if ended else None

    def wait(self) -> int:
        if self._code is None:
            self._code = int(self._answers.readline() or 1)
        return self._code


def start_rank(arguments: Sequence[str], environment: Mapping[str, str], **options: Any) -> Cold | Warm:
    """Start a rank, warm if there is a process that forks it.

    Args:
        options: ``output``, ``directory`` and ``terminal`` of ``Warm``.
    """
    where = os.environ.get(WARM) or os.environ.get(FRESH)
    return Warm(arguments, environment, where, **options) if where else Cold(arguments, environment, **options)


def placed(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables from which a rank learns its place in a training on this machine."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


def one(arguments: list[str], where: str) -> int:
    """Stand for a Python that is forked there: end when it ends, and pass on that it is to end."""
    python = Warm(arguments, dict(os.environ), where, (1, 2, 0))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(python.pid, signal.SIGTERM))
    return python.wait()


def main() -> int:
    if sys.argv[1] == "fresh":
        return one(sys.argv[2:], os.environ[FRESH])
    ranks = int(sys.argv[1])
    if not ranks:
        return one(sys.argv[2:], os.environ[WARM])
    with free_port() as port:
        running = [start_rank(sys.argv[2:], os.environ | placed(rank, ranks, port)) for rank in range(ranks)]
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
