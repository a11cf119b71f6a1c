"""Detection of workers that the kernel's out-of-memory killer ended."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron.fill.linux.proc import numbers

_RECORD_BYTES = 8192  # the longest record of /dev/kmsg


class OomLog:
    """A reader of the kernel's log from now on, or if that is not allowed, of its count of out-of-memory kills."""

    def __init__(self, log: Path = Path("/dev/kmsg"), counters: Path = Path("/proc/vmstat")) -> None:
        self._counters = counters
        self._before = self._count()
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def explain(self, pids: set[int]) -> str:
        """The kernel's message about the killing of one of these processes; empty if it killed none."""
        if self._fd is not None:
            for record in self._records():
                found = re.search(r"[Oo]ut of memory.*Killed process (\d+)", record)
                if found and int(found[1]) in pids:
                    return f"the kernel ended it: {record.partition(';')[2].strip().splitlines()[0]}"
            return ""
        if self._count() > self._before:
            return "the kernel was out of memory while it ran and ended a process, most likely this worker"
        return ""

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _records(self) -> Iterator[str]:
        assert self._fd is not None
        while True:
            try:
                data = os.read(self._fd, _RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                return
            if not data:
                return
            yield data.decode(errors="replace")

    def _count(self) -> int:
        return numbers(self._counters).get("oom_kill", 0)
