"""Calls of the C library that Python lacks; their errors are raised as OSError."""

from __future__ import annotations

import ctypes
import errno
import os

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def last_error(what: str | None = None) -> OSError:
    """The error (errno) of the latest call in this thread; ``what`` names the file or call that failed."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), what)


def error_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "failed")


def system_call(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make the system call with this number."""
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result: int = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise last_error()
    return result


def prctl(option: int, value: int = 0) -> int:
    """Call prctl(2) with one argument."""
    result: int = libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    if result < 0:
        raise last_error()
    return result
