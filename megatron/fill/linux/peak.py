"""The most memory that this process has had resident, since it was last asked to forget that.

Forgetting is a write to a file of ``/proc``, which a job sees read-only: it is opened before that is so.
"""

from __future__ import annotations

import contextlib
import os

_RESET = b"5"  # what clears VmHWM, see proc_pid_clear_refs(5)
_kept: dict[int, int] = {}  # this process: a descriptor of its own file


def keep(proc: int) -> None:
    """Keep the file open that a job's process cannot open any more.

    Args:
        proc: a descriptor of a ``/proc`` that can be written.
    """
    with contextlib.suppress(OSError):  # whoever measures is told then
        _kept[os.getpid()] = os.open("self/clear_refs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)


class PeakMemory:
    """This process's own.

    Raises:
        OSError: it sees ``/proc`` read-only and has kept nothing.
    """

    def __init__(self) -> None:
        kept = _kept.get(os.getpid())
        self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC) if kept is None else kept
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)

    def reset(self) -> None:
        os.write(self._clear, _RESET)

    def read_bytes(self) -> int:
        text = os.pread(self._status, 4096, 0)
        start = text.index(b"VmHWM:") + len(b"VmHWM:")
        return int(text[start : text.index(b"kB", start)]) * 1024
