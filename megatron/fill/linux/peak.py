"""The peak of this process's resident memory since the last reset.

A reset writes to a file in ``/proc``, which is read-only for a job: the file is opened before that.
"""

from __future__ import annotations

import contextlib
import os

from megatron.fill.linux.proc import numbers

_RESET = b"5"  # value that resets VmHWM, see proc_pid_clear_refs(5)
_kept: dict[int, int] = {}  # pid of this process: descriptor of its clear_refs


def keep(proc: int) -> None:
    """Open ``clear_refs`` in this descriptor of a writable ``/proc``, since a job's process cannot open it later."""
    with contextlib.suppress(OSError):  # ``PeakMemory`` raises the error
        _kept[os.getpid()] = os.open("self/clear_refs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)


class PeakMemory:
    """The peak of this process's resident memory; OSError if ``/proc`` is read-only and ``keep`` was not called."""

    def __init__(self) -> None:
        kept = _kept.get(os.getpid())
        self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC) if kept is None else kept

    def reset(self) -> None:
        os.write(self._clear, _RESET)

    def read_bytes(self) -> int:
        return 1024 * numbers("/proc/self/status")["VmHWM"]
