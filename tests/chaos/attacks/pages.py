"""Attacks on the pages that a job shares with rank and agent, and on other pages."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

from megatron.fill.linux.libc import libc
from tests.chaos import memfiles
from tests.chaos.attacks.base import Attack, Ground, NoTargetError, beside, try_all
from tests.chaos.kind import attack

_STORM_S = 2.0
_MOST_BYTES = 64 * 1024
_REMOVE = 9  # MADV_REMOVE
_SIZE = ("cut", "grow", "seal")
_OWN = ("baton", "steps")  # what a job may write
_SHARED = ("gate", "cycle", "control", "baton", "steps")


def _foreign_pages(ground: Ground) -> str:
    """Write zeros to the shared pages of ranks and agents, opened through /proc."""

    def wipe(path: str) -> None:
        if not os.readlink(path).startswith("/memfd:pipefill"):
            raise NoTargetError("it is no page")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.pwrite(fd, bytes(64), 0)
        finally:
            os.close(fd)

    def wipe_all(pid: int) -> None:
        paths = [f"/proc/{pid}/fd/{entry}" for entry in os.listdir(f"/proc/{pid}/fd")]
        try_all((path, partial(wipe, path)) for path in paths)

    return try_all((f"pages of {pid}", partial(wipe_all, pid)) for pid in ground.everyone())


def _control_write(ground: Ground) -> str:
    """Write to the control page that the job itself was given."""
    return try_all(memfiles.attacks("control"))


def _resize(ground: Ground) -> str:
    """Cut, grow and seal every page of the job, and write to the read-only ones."""
    foreign = [name for name in _SHARED if name not in _OWN]
    own = [way for way in memfiles.attacks(*_OWN) if way[0].split()[0] in _SIZE]
    return try_all([*memfiles.attacks(*foreign), *own])


def _punch(ground: Ground) -> str:
    """Take the memory away from the pages that the job may write."""
    for name in _OWN:
        page = memfiles.writable(name)
        libc.madvise(ctypes.c_void_p(page.begin), ctypes.c_size_t(page.end - page.begin), _REMOVE)
    return ""


def _storm(name: str, data: Callable[[int], bytes]) -> str:
    """Overwrite a page for two seconds."""
    page = memfiles.writable(name)
    size = min(page.end - page.begin, _MOST_BYTES)

    def write() -> None:
        end_s = time.monotonic() + _STORM_S
        while time.monotonic() < end_s:
            page.write(data(size))
            time.sleep(0.001)

    beside(write)
    return ""


def _fill(name: str, pattern: bytes, ground: Ground) -> str:
    """Overwrite a page with a pattern, again and again."""
    return _storm(name, lambda size: (pattern * size)[:size])


def _flicker(name: str, ground: Ground) -> str:
    """Overwrite a page with random bytes, again and again."""
    return _storm(name, os.urandom)


def _tables() -> Iterator[Attack]:
    refused = partial(attack, refused=True)
    either = partial(attack, either=True)
    spoiling = partial(either, exact=False)
    nan = b"\0\0\0\0\0\0\xf8\x7f"
    yield Attack(
        refused("foreign-pages", "zeros over the pages of ranks and agents, found through /proc"), _foreign_pages, 1.0
    )
    yield Attack(refused("control-write", "writes to its own end of the control page"), _control_write)
    yield Attack(refused("pages-resize", "cuts, grows and seals the pages that it shares"), _resize)
    yield Attack(spoiling("pages-punch", "takes the memory out of baton and step log"), _punch)
    yield Attack(either("baton-ones", "the baton full of ones for two seconds"), partial(_fill, "baton", b"\xff"), 3.0)
    yield Attack(either("baton-zeros", "the baton full of zeros for two seconds"), partial(_fill, "baton", b"\0"), 3.0)
    yield Attack(either("baton-flicker", "the baton changing for two seconds"), partial(_flicker, "baton"), 3.0)
    yield Attack(
        spoiling("log-ones", "the step log full of ones for two seconds"), partial(_fill, "steps", b"\xff"), 3.0
    )
    yield Attack(spoiling("log-nan", "the step log full of NaN for two seconds"), partial(_fill, "steps", nan), 3.0)
    yield Attack(spoiling("log-flicker", "the step log changing for two seconds"), partial(_flicker, "steps"), 3.0)


ATTACKS = tuple(_tables())
