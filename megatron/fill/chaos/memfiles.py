"""What a worker may try against the memory files that it shares with the main job and its agent."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

_PAGE = 4096
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None, use_errno=True)


def shared(*names: str) -> dict[str, list[int]]:
    """The descriptors of this process's PipeFill memory files, by the name in their link.

    Args:
        names: such as ``gate``, ``cycle``, ``baton``, ``steps``; those that are not open are left out.
    """
    found: dict[str, list[int]] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            link = os.readlink(entry)
        except OSError:
            continue
        for name in names:
            if link.startswith(f"/memfd:pipefill-{name}"):
                found.setdefault(name, []).append(int(entry.name))
    return found


def scribble(fd: int) -> None:
    """Random bytes all over a file that this process may write."""
    os.pwrite(fd, os.urandom(os.fstat(fd).st_size), 0)


def attacks() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every way to write to gate and board that a worker has; each should raise OSError.

    One that gets through writes what is there already: it shows the hole, and does no harm.
    """
    for name, (fd, *_) in shared("gate", "cycle").items():
        for attack in (_write, _map, _protect, _reopen, _cut, _seal):
            yield f"{attack.__name__[1:]} {name}", partial(attack, fd)


def _write(fd: int) -> None:
    os.pwrite(fd, os.pread(fd, 8, 8), 8)


def _map(fd: int) -> None:
    mmap.mmap(fd, _PAGE, prot=_PROT_READ_WRITE).close()


def _protect(fd: int) -> None:
    """Make the mapping that this process has of the file writable."""
    inode = os.fstat(fd).st_ino
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if len(fields) > 5 and int(fields[4]) == inode and fields[5].startswith("/memfd:pipefill"):
            begin, end = (int(text, 16) for text in fields[0].split("-"))
            if _libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _PROT_READ_WRITE) == 0:
                return
    raise PermissionError("no mapping of it can be made writable")


def _reopen(fd: int) -> None:
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        _write(again)
    finally:
        os.close(again)


def _cut(fd: int) -> None:
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        os.ftruncate(fd, 0)
        return
    try:
        os.ftruncate(again, 0)
    finally:
        os.close(again)


def _seal(fd: int) -> None:
    """Forbid all writing: it would take the file away from its writer."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
