"""Wait for, and wake on, a 32-bit word in shared memory (Linux ``futex(2)``).

A wake can never block, whatever the waiters do: that is why the gate is a futex and not a pipe, a socket or an
eventfd, whose far end could be filled up by a misbehaving side task.

Whoever maps the page, read-only too, can wake its waiters for nothing, have the kernel move them to a word of its own
(``FUTEX_REQUEUE``), and queue waiters of its own before them.  So a wait gives a time-out and looks again, naps after a
wake for nothing, and a wake on a page that jobs map is bounded.
"""

from __future__ import annotations

import ctypes
import errno
import time

from megatron.fill.linux.libc import libc

_NUMBER = ctypes.c_long(202)  # the system call's on x86-64; no other architecture is admitted (architecture.py)
_WAIT = 0
_WAKE = 1
ALL = 0x7FFFFFFF  # waiters
NAP_S = 0.001

# Waiting must release the interpreter lock, as libc's calls do; waking takes about a microsecond and must not hand the
# lock to anybody.
_waking = ctypes.PyDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, expected: int, timeout_ns: int) -> bool:
    """Sleep in the kernel while the word at ``address`` equals ``expected``, at most ``timeout_ns``.

    A wake that finds the word as it was costs a nap of ``NAP_S``: a storm of them is not to keep the caller busy.

    Returns:
        False when ``timeout_ns`` passed; True after a wake, a signal, or at once if the word differs already.  The
        caller looks at the word again in any case.
    """
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
        if ctypes.c_uint32.from_address(address).value == expected:
            time.sleep(NAP_S)
        return True
    code = ctypes.get_errno()
    if code == errno.ETIMEDOUT:
        return False
    if code in (errno.EAGAIN, errno.EINTR):
        return True
    raise OSError(code, "futex wait failed")


class Waker:
    """Wakes who waits on the word at ``address``, the first ``most`` of them; prepared once.

    It takes a microsecond, and some more for each that it wakes.  On a word on which jobs can wait it must be bounded:
    a job can have as many waiters as threads, and 250 of them make a call take milliseconds.
    """

    __slots__ = ("_arguments",)

    def __init__(self, address: int, most: int) -> None:
        self._arguments = (
            _NUMBER,
            ctypes.c_void_p(address),
            ctypes.c_int(_WAKE),
            ctypes.c_int(most),
            None,
            None,
            ctypes.c_int(0),
        )

    def __call__(self) -> None:
        _waking.syscall(*self._arguments)
