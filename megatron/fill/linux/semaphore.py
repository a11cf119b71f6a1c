"""A POSIX semaphore in shared memory, which a CUDA host function can post.

A host function gets one pointer and may neither run Python nor call CUDA; libc's ``sem_post`` fulfils that.
"""

from __future__ import annotations

import ctypes
import errno

from megatron.fill.linux.libc import last_error, libc

SEMAPHORE_BYTES = 64  # glibc's sem_t takes 32 on a 64-bit machine
libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
libc.sem_post.argtypes = libc.sem_wait.argtypes = (ctypes.c_void_p,)
POST_FUNCTION = ctypes.cast(libc.sem_post, ctypes.c_void_p).value or 0  # address of sem_post


def create(address: int) -> None:
    """Initialize a semaphore with the value 0 in ``SEMAPHORE_BYTES`` of shared memory at ``address``."""
    _check(libc.sem_init(address, 1, 0), "sem_init")


def post(address: int) -> None:
    _check(libc.sem_post(address), "sem_post")


def wait(address: int) -> None:
    """Sleep in the kernel until the value is above 0, and decrement it."""
    while libc.sem_wait(address):
        if ctypes.get_errno() != errno.EINTR:
            _check(-1, "sem_wait")


def _check(result: int, name: str) -> None:
    if result:
        raise last_error(name)
