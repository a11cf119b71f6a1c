"""Against the pages that a job shares with rank and agent, and those that it does not."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from megatron.fill.chaos import memfiles
from megatron.fill.chaos.attacks.base import Attack, Ground, beside, try_all
from megatron.fill.chaos.kind import attack

_libc = ctypes.CDLL(None, use_errno=True)
_STORM_S = 2.0
_OWN = ("baton", "steps")  # what a job may write
_SHARED = ("gate", "cycle", "control", "baton", "steps")


def _foreign_pages(ground: Ground) -> str:
    """Zeros over the shared pages of ranks and agents, opened through /proc."""

    def wipe(pid: int, entry: str) -> None:
        path = f"/proc/{pid}/fd/{entry}"
        if not os.readlink(path).startswith("/memfd:pipefill"):
            raise OSError("it is no page")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.pwrite(fd, bytes(64), 0)
        finally:
            os.close(fd)

    def entries(pid: int) -> list[str]:
        with suppress(OSError):
            return os.listdir(f"/proc/{pid}/fd")
        return []

    return try_all((f"{pid}/{entry}", partial(wipe, pid, entry)) for pid in ground.everyone() for entry in entries(pid))


def _control_write(ground: Ground) -> str:
    """Write to the control page that the job itself was given."""

    def again(fd: int) -> None:
        opened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.pwrite(opened, os.pread(opened, 8, 0), 0)
        finally:
            os.close(opened)

    def mapped(fd: int) -> None:
        mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE).close()

    def plain(fd: int) -> None:
        os.pwrite(fd, os.pread(fd, 8, 0), 0)

    fds = [fd for found in memfiles.shared("control").values() for fd in found]
    return try_all((f"{way.__name__} {fd}", partial(way, fd)) for fd in fds for way in (plain, mapped, again))


def _resize(ground: Ground) -> str:
    """Cut, grow and seal every page that it has."""

    def cut(fd: int) -> None:
        os.ftruncate(fd, 0)

    def grow(fd: int) -> None:
        os.ftruncate(fd, 1 << 30)

    def lengthen(fd: int) -> None:
        os.posix_fallocate(fd, 0, 64 << 20)

    def seal(fd: int) -> None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    found = memfiles.shared(*_SHARED)
    return try_all(
        (f"{way.__name__} {name}", partial(way, fds[0]))
        for name, fds in found.items()
        for way in (cut, grow, lengthen, seal)
    )


def _punch(ground: Ground) -> str:
    """Take the memory away from under the pages that it may write."""
    for fds in memfiles.shared(*_OWN).values():
        _libc.fallocate(fds[0], 3, ctypes.c_long(0), ctypes.c_long(os.fstat(fds[0]).st_size))
    return ""


def _fill(name: str, bytes_of: bytes, ground: Ground) -> str:
    """One pattern all over a page, again and again."""
    fd = memfiles.shared(name)[name][0]
    size = min(os.fstat(fd).st_size, 64 * 1024)
    pattern = (bytes_of * size)[:size]

    def storm() -> None:
        end_s = time.monotonic() + _STORM_S
        while time.monotonic() < end_s:
            os.pwrite(fd, pattern, 0)
            time.sleep(0.001)

    beside(storm)
    return ""


def _flicker(name: str, ground: Ground) -> str:
    """Random bytes all over a page, for two seconds."""
    fd = memfiles.shared(name)[name][0]

    def storm() -> None:
        end_s = time.monotonic() + _STORM_S
        while time.monotonic() < end_s:
            os.pwrite(fd, os.urandom(4096), 0)

    beside(storm)
    return ""


def _tables() -> Iterator[Attack]:
    refused = partial(attack, refused=True)
    either = partial(attack, either=True)
    nan = b"\0\0\0\0\0\0\xf8\x7f"
    yield Attack(
        refused("foreign-pages", "zeros over the pages of ranks and agents, found through /proc"), _foreign_pages, 1.0
    )
    yield Attack(refused("control-write", "writes to its own end of the control page"), _control_write)
    yield Attack(refused("pages-resize", "cuts, grows and seals the pages that it shares"), _resize)
    yield Attack(either("pages-punch", "takes the memory out of baton and step log"), _punch)
    yield Attack(either("baton-ones", "the baton full of ones for two seconds"), partial(_fill, "baton", b"\xff"), 3.0)
    yield Attack(either("baton-zeros", "the baton full of zeros for two seconds"), partial(_fill, "baton", b"\0"), 3.0)
    yield Attack(either("baton-flicker", "the baton changing for two seconds"), partial(_flicker, "baton"), 3.0)
    yield Attack(either("log-ones", "the step log full of ones for two seconds"), partial(_fill, "steps", b"\xff"), 3.0)
    yield Attack(either("log-nan", "the step log full of NaN for two seconds"), partial(_fill, "steps", nan), 3.0)
    yield Attack(either("log-flicker", "the step log changing for two seconds"), partial(_flicker, "steps"), 3.0)


ATTACKS = tuple(_tables())
