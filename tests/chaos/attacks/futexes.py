"""Attacks on processes that sleep on the shared pages: each operation of futex(2), also on read-only pages."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from tests.chaos import memfiles
from tests.chaos.attacks.base import Attack, Ground, NoTargetError, Refused, beside, try_all
from tests.chaos.attacks.calls import syscall
from tests.chaos.kind import attack

_WAIT, _WAKE, _REQUEUE, _CMP_REQUEUE, _WAKE_OP, _LOCK_PI, _LOCK_PI2 = 0, 1, 3, 4, 5, 6, 13
_MANY = 1 << 30
_STORM_S, _WAITERS = 3.0, 200
_SHARED_32 = 0x02  # FUTEX2_SIZE_U32
_own = ctypes.create_string_buffer(4096)  # where waiters would be moved to


class _Waiter(ctypes.Structure):
    """The argument of the calls since Linux 5.16."""

    _fields_ = (
        *(("value", ctypes.c_uint64), ("address", ctypes.c_uint64)),
        *(("flags", ctypes.c_uint32), ("zero", ctypes.c_uint32)),
    )


def _word(page: str) -> int:
    """The address of the first word of a page.

    Raises:
        NoTargetError: the page is not mapped here.
    """
    found = memfiles.mappings(page)
    if not found:
        raise NoTargetError(f"{page} is not mapped here")
    return found[0].begin


def _value(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


def _futex(address: int, operation: int, value: int, more: int = 0, other: int = 0, last: int = 0) -> int:
    return syscall("futex", address, operation, value, more, other, last)


def _moved() -> None:
    """Wake the processes that were moved, so that the training's agent continues if the attack succeeds.

    Raises:
        Refused: none was moved.
    """
    if not _futex(ctypes.addressof(_own), _WAKE, _MANY):
        raise Refused("nobody slept there: none was moved")


def _requeue(page: str, operation: int, ground: Ground) -> str:
    """Move the processes that sleep on the page to a word of the job's own, where they are never woken."""

    def move() -> None:
        address = _word(page)
        _futex(address, operation, 0, _MANY, ctypes.addressof(_own), _value(address))
        _moved()

    return try_all([(f"operation {operation} on {page}", move)])


def _requeue_2(page: str, ground: Ground) -> str:
    """Do the same by futex_requeue(2)."""

    def move() -> None:
        address = _word(page)
        pair = (_Waiter * 2)(
            _Waiter(_value(address), address, _SHARED_32, 0), _Waiter(0, ctypes.addressof(_own), _SHARED_32, 0)
        )
        syscall("futex_requeue", ctypes.addressof(pair), 0, 0, _MANY)
        _moved()

    return try_all([(f"futex_requeue on {page}", move)])


def _written(page: str, operation: int, ground: Ground) -> str:
    """Use an operation by which the kernel writes to the word."""

    def change() -> None:
        address = _word(page)
        before = _value(address)
        # Add 4 to the second word; or take the lock that it would be.
        _futex(
            address if operation != _WAKE_OP else ctypes.addressof(_own), operation, 0, 0, address, 1 << 28 | 4 << 12
        )
        if _value(address) == before:
            raise Refused("the word is what it was")

    return try_all([(f"operation {operation} on {page}", change)])


def _robust(ground: Ground) -> str:
    """Kill a process whose list of robust locks has the baton: the kernel marks the word."""
    page = memfiles.writable("baton")
    pid = os.fork()
    if pid == 0:
        page.write(struct.pack("=I", os.getpid()))
        head = (ctypes.c_uint64 * 6)()
        at = ctypes.addressof(head)
        head[0], head[1], head[4] = at + 32, (page.begin - (at + 32)) & (2**64 - 1), at  # one entry, 32 bytes on
        try:
            syscall("set_robust_list", at, 24)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"the baton says {_value(page.begin):#x}"


def _crowd(page: str, ground: Ground) -> str:
    """Sleep on the word with hundreds of threads, next to the rank's own: a wake-up has to pass all of them."""
    address = _word(page)
    limit = (ctypes.c_long * 2)(int(_STORM_S), 0)

    def sleep() -> None:
        try:
            _futex(address, _WAIT, _value(address), ctypes.addressof(limit))
        except OSError:
            return

    threading.stack_size(64 * 1024)
    started = 0
    for _ in range(_WAITERS):
        try:
            threading.Thread(target=sleep, daemon=True).start()
        except RuntimeError:
            break
        started += 1
    return f"{started} sleep on {page}"


def _storm(page: str, ground: Ground) -> str:
    """Wake all processes that sleep on the page, as often as possible."""
    address = _word(page)

    def wake() -> None:
        end_s = time.monotonic() + _STORM_S
        while time.monotonic() < end_s:
            for _ in range(100):
                _futex(address, _WAKE, _MANY)

    beside(wake)
    return f"wakes on {page}"


def _wait_many(page: str, ground: Ground) -> str:
    """Sleep on a page by futex_waitv."""

    def wait() -> None:
        address = _word(page)
        one = _Waiter((_value(address) + 1) & 0xFFFFFFFF, address, _SHARED_32, 0)  # another value: it returns at once
        try:
            syscall("futex_waitv", ctypes.addressof(one), 1, 0, 0, 0)
        except OSError as error:
            if error.errno != 11:  # EAGAIN: it would have slept
                raise

    return try_all([(f"futex_waitv on {page}", wait)])


def _tables() -> Iterator[Attack]:
    refused, either = partial(attack, refused=True), partial(attack, either=True)
    for page in ("control", "gate"):
        moves: tuple[tuple[str, Callable[[Ground], str]], ...] = (
            ("requeue", partial(_requeue, page, _REQUEUE)),
            ("cmp-requeue", partial(_requeue, page, _CMP_REQUEUE)),
            ("requeue-2", partial(_requeue_2, page)),
        )
        for name, commit in moves:
            yield Attack(refused(f"{name}-{page}", f"moves who sleeps on the {page} page elsewhere"), commit, 1.0)
        for name, number in (("wake-op", _WAKE_OP), ("lock-pi", _LOCK_PI), ("lock-pi-2", _LOCK_PI2)):
            yield Attack(
                refused(f"{name}-{page}", f"has the kernel write to the {page} page (futex)"),
                partial(_written, page, number),
            )
        yield Attack(
            refused(f"wait-many-{page}", f"sleeps on the {page} page by futex_waitv"), partial(_wait_many, page)
        )
        yield Attack(either(f"crowd-{page}", f"200 threads sleep on the {page} page"), partial(_crowd, page), 4.0)
        yield Attack(either(f"storm-{page}", f"wakes on the {page} page without end"), partial(_storm, page), 4.0)
    yield Attack(either("robust-baton", "dies with the baton as its lock, which the kernel then marks"), _robust, 1.0)


ATTACKS = tuple(_tables())
