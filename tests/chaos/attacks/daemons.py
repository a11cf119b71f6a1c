"""The commands of a chaos run: processes that continue where a command is stopped.  All end by themselves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.chaos.attacks.base import own_session
from tests.chaos.marks import Note, mark

_LONG_S, _LONGER_S = 6.0, 15.0
_MOST_SHARE = 0.8  # share of a core that a process stopped between bubbles cannot reach


def burn_long(marks: str) -> None:
    """Do the same for longer."""
    burn(marks, _LONGER_S)


def burn(marks: str, seconds: float = _LONG_S) -> None:
    """Start daemons in sessions of their own, busy for some seconds; they note it if they had too much of a core."""
    mark(Path(marks), Note.FAULT)
    for _ in range(3):
        if os.fork() == 0:
            own_session()
            if os.fork() == 0:
                _busy(Path(marks), seconds)
            os._exit(0)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(0.2)


def _busy(marks: Path, seconds: float = _LONG_S) -> None:
    start_s = time.monotonic()
    while time.monotonic() - start_s < seconds:
        pass
    share = time.process_time() / seconds
    if share > _MOST_SHARE:
        mark(marks, Note.THROUGH, f"a daemon had {share:.0%} of a core, between bubbles too")


def escape(marks: str, seconds: float = _LONG_S) -> None:
    """End at once, and leave busy processes in sessions of their own."""
    mark(Path(marks), Note.FAULT)
    for _ in range(3):
        if os.fork() == 0:
            own_session()
            if os.fork() == 0:
                _busy(Path(marks), seconds)
            os._exit(0)


def defy(marks: str, seconds: float = _LONG_S) -> None:
    """Start a child that continues its parent whenever that is stopped."""
    mark(Path(marks), Note.FAULT)
    parent = os.getpid()
    if os.fork() == 0:
        own_session()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            try:
                os.kill(parent, signal.SIGCONT)
            except ProcessLookupError:
                break
            time.sleep(0.001)
        os._exit(0)
    _busy(Path(marks), seconds)
