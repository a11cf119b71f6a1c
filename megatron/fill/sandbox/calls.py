"""Calls into the kernel that Python has no name for."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_MNT_DETACH = 2


def system_call(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call by its number.

    Raises:
        OSError: the kernel refused it.
    """
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise _last_error()
    return result


def prctl(option: int, value: int = 0) -> int:
    """prctl(2) with one argument.

    Raises:
        OSError: the kernel refused it.
    """
    result: int = _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    if result < 0:
        raise _last_error()
    return result


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2).

    Raises:
        OSError: the kernel refused it.
    """
    words = [text.encode() if text else None for text in (source, target, kind)]
    if _libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None):
        raise _last_error(target)


def unmount(target: str) -> None:
    """umount2(2), at once, whoever still uses it.

    Raises:
        OSError: the kernel refused it.
    """
    if _libc.umount2(target.encode(), _MNT_DETACH):
        raise _last_error(target)


def capabilities(sets: bytes | None = None) -> bytes:
    """The three sets of this thread's capabilities as six words (capget(2)), after setting them if given.

    Raises:
        OSError: the kernel refused it.
    """
    header = (0x20080522).to_bytes(4, "little") + bytes(4)  # two words for each set; this thread
    buffer = ctypes.create_string_buffer(sets or bytes(24), 24)
    if (_libc.capset if sets is not None else _libc.capget)(header, buffer):
        raise _last_error()
    return buffer.raw


def _last_error(path: str | None = None) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), path) if path else OSError(code, os.strerror(code))
