"""Attempts of a worker on the memory files that it shares with the training and its agent.

It has them mapped.  The descriptors are closed before a task runs, so attempts that need one go through
``/proc/self/map_files`` and ``/proc/self/fd``, if those have any.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.fill.linux.libc import last_error, libc
from megatron.fill.pages.steplog import StepLog

_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


@dataclass(frozen=True, slots=True)
class Mapping:
    """A memory file as this process has it mapped.

    Attributes:
        name: such as ``gate``, ``cycle``, ``control``, ``baton``, ``steps``.
    """

    name: str
    begin: int
    end: int
    writable: bool

    def write(self, data: bytes) -> None:
        """Overwrite its beginning; the mapping must be writable."""
        ctypes.memmove(self.begin, data, min(len(data), self.end - self.begin))


def mappings(*names: str) -> list[Mapping]:
    """The mappings of the memory files with these names."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        for name in names:
            if len(fields) > 5 and fields[5].startswith(f"/memfd:pipefill-{name}"):
                begin, end = (int(text, 16) for text in fields[0].split("-"))
                found.append(Mapping(name, begin, end, "w" in fields[1]))
    return found


def writable(name: str) -> Mapping:
    """The writable mapping with this name.

    Raises:
        PermissionError: there is none.
    """
    for one in mappings(name):
        if one.writable:
            return one
    raise PermissionError(f"no mapping of {name} can be written to")


def descriptors(*names: str) -> dict[str, list[int]]:
    """The open descriptors of this process's memory files, by name."""
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


def step_log() -> StepLog:
    """This worker's step log, over its mapping, since no descriptor is left.

    Raises:
        PermissionError: it is not writable.
    """
    page = writable("steps")
    return StepLog(memoryview((ctypes.c_char * (page.end - page.begin)).from_address(page.begin)).cast("B"))


def scribble(name: str) -> None:
    """Overwrite a memory file that this process may write with random bytes."""
    page = writable(name)
    page.write(os.urandom(page.end - page.begin))


def attacks(*names: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield every way to write to memory files that a worker must not write; each should raise OSError.

    A way that succeeds writes the bytes that are there already: it shows the hole, and does no harm.
    """
    for page in mappings(*names):
        for attack in (_protect, _through_map, _through_memory):
            yield f"{attack.__name__[1:]} {page.name}", partial(attack, page)
    for name, (fd, *_) in descriptors(*names).items():
        for through in (_write, _map, _reopen, _cut, _grow, _seal):
            yield f"{through.__name__[1:]} {name}", partial(through, fd)


def _protect(page: Mapping) -> None:
    """Make the mapping writable."""
    size = ctypes.c_size_t(page.end - page.begin)
    if libc.mprotect(ctypes.c_void_p(page.begin), size, _PROT_READ_WRITE):
        raise last_error()


def _through_map(page: Mapping) -> None:
    """Open the file again through its entry in ``map_files``, and write to it."""
    fd = os.open(f"/proc/self/map_files/{page.begin:x}-{page.end:x}", os.O_RDWR | os.O_CLOEXEC)
    try:
        _write(fd)
    finally:
        os.close(fd)


def _through_memory(page: Mapping) -> None:
    """Write through ``/proc/self/mem``, which ignores the protection of pages.

    For a read-only shared mapping the kernel makes no private copy: it refuses.
    """
    fd = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(fd, ctypes.string_at(page.begin + 8, 8), page.begin + 8)
    finally:
        os.close(fd)


def _write(fd: int) -> None:
    os.pwrite(fd, os.pread(fd, 8, 8), 8)


def _map(fd: int) -> None:
    mmap.mmap(fd, mmap.PAGESIZE, prot=_PROT_READ_WRITE).close()


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


def _grow(fd: int) -> None:
    os.posix_fallocate(fd, 0, 64 << 20)


def _seal(fd: int) -> None:
    """Forbid all writing, which would take the file away from its writer."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
