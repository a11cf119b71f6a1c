"""The files of ``/proc`` and of control groups: whole, as numbers, and as the fields of a process or thread."""

from __future__ import annotations

import os
from pathlib import Path

_READ_BYTES = 1 << 16
_HOST_PIDS = "pid:[4026531836]"  # the first pid namespace has this number on every Linux


def read(path: str | Path) -> bytes:
    """Read a whole file; empty if it or its process is gone.  A few times faster than ``Path.read_bytes``."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    parts = []
    try:
        while part := os.read(fd, _READ_BYTES):  # the kernel may give a page at a time
            parts.append(part)
    except OSError:  # the process has ended in the meantime
        return b""
    finally:
        os.close(fd)
    return b"".join(parts)


def text(path: str | Path) -> str:
    return read(path).decode(errors="replace")


def numbers(path: str | Path) -> dict[str, int]:
    """The first number behind each name (``anon 4096``, ``VmSwap: 4 kB``), in the file's units."""
    found = {}
    for line in read(path).split(b"\n"):  # the only end of a line that a process cannot have in its name there
        words = line.replace(b":", b" ", 1).split(maxsplit=2)
        if len(words) > 1 and words[1].isdigit():
            found[words[0].decode(errors="replace")] = int(words[1])
    return found


def number(path: str | Path) -> int | None:
    """The number that a file holds; None if there is no such file, or something else in it."""
    found = read(path).strip()
    return int(found) if found.isdigit() else None


def names_in(folder: str) -> list[str]:
    """The names in a folder; none if it or its process is gone, or it is not readable."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def stat_fields(path: str | Path) -> list[bytes]:
    """The fields of a ``stat`` file of /proc, in the order of proc_pid_stat(5) from 0, without pid and name.

    Empty once the process or thread is gone.
    """
    stat = read(path)
    # The name, in parentheses, may contain any characters, also spaces and parentheses.
    return [b"", b"", *stat[stat.rindex(b")") + 1 :].split()] if stat else []


def state_in(stat: str | Path) -> str:
    """The state letter in a ``stat`` file; X once its process or thread has ended."""
    fields = stat_fields(stat)
    return fields[2].decode() if fields else "X"


def waited_ns_in(schedstat: Path) -> int:
    """The time in ns that a thread was ready but had no core, from its ``schedstat``; 0 if the kernel has no such file.

    A wait that has not ended is not included.
    """
    fields = read(schedstat).split()
    return int(fields[1]) if len(fields) > 1 else 0


def has_host_pids(proc: Path = Path("/proc")) -> bool:
    """True if this process is in the machine's first pid namespace, whose pids drivers and the kernel's log name."""
    try:
        return os.readlink(proc / "self/ns/pid") == _HOST_PIDS
    except OSError:
        return False
