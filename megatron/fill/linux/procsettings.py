"""Kernel settings that a worker can change if no sandbox makes ``/proc`` read-only: changes are detected and undone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from megatron.fill.linux.proc import read

_TRIES, _PAUSE_S = 5, 0.06  # the kernel changes an autogroup ten times a second at most
_BROKEN = "it changed its own standing"


class ProcSettings:
    """A worker's ``oom_score_adj``, and the nice value of the session that it shares with its rank and its agent.

    The present ``oom_score_adj`` of its first process is expected of all its processes.
    """

    def __init__(self, pid: int, proc: str = "/proc") -> None:
        self._proc = proc
        self._adjustment = self._read_adjustment(pid)
        self._nice = self._read_nice()

    def look(self, pids: Iterable[int]) -> str:
        """Undo changes by these processes; return the reason to end the worker, empty if nothing was changed."""
        found = ""
        for pid in pids:
            now = self._read_adjustment(pid)
            if now is not None and self._adjustment is not None and now < self._adjustment:
                found = f"{_BROKEN}: oom_score_adj of process {pid} was {now}, expected {self._adjustment}"
                with contextlib.suppress(OSError):  # it has ended
                    Path(f"{self._proc}/{pid}/oom_score_adj").write_text(str(self._adjustment), encoding="ascii")
        return found or self.restore_autogroup()

    def restore_autogroup(self) -> str:
        """Restore the session's nice value; return a description of the change, empty if there was none."""
        now = self._read_nice()
        if now is None or self._nice is None or now == self._nice:
            return ""
        for _ in range(_TRIES):
            with contextlib.suppress(OSError):
                Path(f"{self._proc}/self/autogroup").write_text(str(self._nice), encoding="ascii")
            if self._read_nice() == self._nice:
                break
            time.sleep(_PAUSE_S)
        return f"{_BROKEN}: the nice value of its session was {now}, expected {self._nice}"

    def _read_adjustment(self, pid: int) -> int | None:
        text = read(f"{self._proc}/{pid}/oom_score_adj")
        return int(text) if text.strip() else None

    def _read_nice(self) -> int | None:
        """The nice value of this process's autogroup (``/autogroup-12 nice 0``); None without autogroups."""
        fields = read(f"{self._proc}/self/autogroup").split()
        return int(fields[-1]) if fields else None
