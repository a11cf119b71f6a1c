"""Processes that each do what they are told, one line of JSON each way: both ends of that."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

START_S = 60.0  # torch is imported, and the GPU's clocks are warmed up
_END_S = 10.0


class ActorError(RuntimeError):
    """A process of the measurement failed, or did not answer in time."""


class Actor:
    """Another process.  It is started at once, and what it says of itself is waited for with its first answer.

    Args:
        name: for messages.
        command: a program that calls ``serve``.
        log: what it prints goes there.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command],
                bufsize=0,  # else closing writes again what a process that has ended did not take
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | environment,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._read = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, action: str, **arguments: Any) -> None:
        """Have it do something; ``answer`` waits for what comes of it."""
        try:
            self._to.write(json.dumps({"do": action} | arguments).encode() + b"\n")
        except BrokenPipeError as error:
            raise ActorError(self._why("has ended")) from error

    def answer(self, timeout_s: float = START_S) -> dict[str, Any]:
        """What came of the oldest thing that was begun.

        Raises:
            ActorError: it failed, ended, or said nothing for so long.
        """
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until_s - time.monotonic()))
            if not ready:
                raise ActorError(self._why(f"did not answer within {timeout_s:g} s"))
            more = os.read(self._from.fileno(), 1 << 16)
            if not more:
                raise ActorError(self._why("has ended"))
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise ActorError(f"{self.name}: {found['error']}")
        return found

    def do(self, action: str, timeout_s: float = START_S, **arguments: Any) -> dict[str, Any]:
        self.begin(action, **arguments)
        return self.answer(timeout_s)

    def kill(self) -> None:
        """At once, in the middle of whatever it does."""
        self._process.kill()
        self._close()

    def end(self) -> None:
        """Politely: a client of MPS should end by itself, with no work outstanding."""
        self._to.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._close()

    def _close(self) -> None:
        self._process.wait()
        self._to.close()
        self._from.close()

    def _why(self, what: str) -> str:
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{self.name} {what}" + (f": {said[-1]}" if said else "")


def serve(actions: object) -> None:
    """Do what the lines of standard input say, with the methods of ``actions``, until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            found = getattr(actions, asked.pop("do"))(**asked)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        print(json.dumps(found), file=answers, flush=True)
