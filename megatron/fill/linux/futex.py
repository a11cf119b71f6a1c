"""Waiting for a change of a 32-bit word in shared memory, and waking the waiters (Linux ``futex(2)``).

A wake can never block, whatever the waiters do: that is why the gate is a futex and not a pipe, a socket or an
eventfd, which a misbehaving job could fill up.

A process that maps the page, even read-only, can wake its waiters for nothing, requeue them to a word of its own
(``FUTEX_REQUEUE``), and queue waiters of its own before them.  So every wait has a timeout after which the caller reads
the word again, and sleeps briefly after a wake for nothing; and on a page that jobs map, a wake wakes a limited number.
"""

from __future__ import annotations

import ctypes
import errno
import time

from megatron.fill.linux.libc import libc

_NUMBER = ctypes.c_long(202)  # the system call's on x86-64; no other architecture is admitted (``host.unordered``)
_WAIT, _WAKE, _UNUSED = ctypes.c_int(0), ctypes.c_int(1), ctypes.c_int(0)
ALL = 0x7FFFFFFF  # waiters
NAP_S = 0.001

# Waiting must release the interpreter lock, as calls of ``libc`` do; waking takes about a microsecond and must not
# release it.
_waking = ctypes.PyDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, expected: int, timeout_ns: int) -> bool:
    """Sleep in the kernel while the word at ``address`` equals ``expected``, for at most ``timeout_ns``.

    After a wake without a change of the word it sleeps ``NAP_S``, so that a storm of wakes does not keep the caller
    busy.  Return False if ``timeout_ns`` has passed; True after a wake, a signal, or at once if the word differs
    already.  The caller must read the word again in any case.
    """
    if timeout_ns <= 0:
        return False
    timeout = ctypes.byref(_Timespec(timeout_ns // 1_000_000_000, timeout_ns % 1_000_000_000))
    word, value = ctypes.c_void_p(address), ctypes.c_uint32(expected)
    if libc.syscall(_NUMBER, word, _WAIT, value, timeout, None, _UNUSED) == 0:
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
    """A call that wakes the first ``most`` waiters on the word at ``address``; its arguments are prepared once.

    A wake takes a microsecond, and more for each waiter woken.  On a word that jobs can wait on, ``most`` must be
    small: a job can have as many waiters as threads, and 250 waiters make a call take milliseconds.
    """

    __slots__ = ("_arguments",)

    def __init__(self, address: int, most: int) -> None:
        self._arguments = _NUMBER, ctypes.c_void_p(address), _WAKE, ctypes.c_int(most), None, None, _UNUSED

    def __call__(self) -> None:
        _waking.syscall(*self._arguments)
