"""Wait for, and wake on, a 32-bit word in shared memory (Linux ``futex(2)``).

A wake can never block, whatever the waiters do: that is why the gate is a futex and not a pipe, a socket or an
eventfd, whose far end could be filled up by a misbehaving side task.
"""

from __future__ import annotations

import ctypes
import errno
import platform

from megatron.fill.linux.libc import libc

_NUMBERS = {"x86_64": 202, "aarch64": 98, "ppc64le": 221}  # of the system call
if platform.machine() not in _NUMBERS:
    raise ImportError(f"no futex system call is known for {platform.machine()}; expected one of {', '.join(_NUMBERS)}")
_NUMBER = ctypes.c_long(_NUMBERS[platform.machine()])
_WAIT = 0
_WAKE = 1
_ALL = 0x7FFFFFFF

# Waiting must release the interpreter lock, as libc's calls do; waking takes about a microsecond and must not hand the
# lock to anybody.
_waking = ctypes.PyDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, expected: int, timeout_ns: int | None = None) -> bool:
    """Sleep in the kernel while the word at ``address`` equals ``expected``.

    Returns:
        False when ``timeout_ns`` passed; True after a wake, a signal, or at once if the word differs already.  The
        caller looks at the word again in any case.
    """
    timeout = None
    if timeout_ns is not None:
        if timeout_ns <= 0:
            return False
        timeout = ctypes.byref(_Timespec(timeout_ns // 1_000_000_000, timeout_ns % 1_000_000_000))
    result = libc.syscall(
        _NUMBER,
        ctypes.c_void_p(address),
        ctypes.c_int(_WAIT),
        ctypes.c_uint32(expected),
        timeout,
        None,
        ctypes.c_int(0),
    )
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.ETIMEDOUT:
        return False
    if code in (errno.EAGAIN, errno.EINTR):
        return True
    raise OSError(code, "futex wait failed")


class Waker:
    """Wakes every process that waits on the word at ``address``; prepared once, about a microsecond a call."""

    __slots__ = ("_arguments",)

    def __init__(self, address: int) -> None:
        self._arguments = (
            _NUMBER,
            ctypes.c_void_p(address),
            ctypes.c_int(_WAKE),
            ctypes.c_int(_ALL),
            None,
            None,
            ctypes.c_int(0),
        )

    def __call__(self) -> None:
        _waking.syscall(*self._arguments)
