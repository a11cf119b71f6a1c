"""Shared memory without a name: anonymous files that leave nothing behind and cannot be truncated."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from megatron.fill.linux.libc import last_error, libc

_FUTURE_WRITE = 0x0010  # F_SEAL_FUTURE_WRITE, which Python's fcntl does not name

libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)


def create(name: str, size: int, *, sealable: bool = False) -> int:
    """Create a file of ``size`` zero bytes that only its owner can open; return its descriptor.

    Its size is sealed: shrinking it would take pages away from processes that have them mapped.  ``sealable`` allows
    ``close_to_writers``.
    """
    fd = os.memfd_create(f"pipefill-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, size)
    no_more = 0 if sealable else fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | no_more)
    return fd


def close_to_writers(fd: int) -> None:
    """Forbid writing from now on, except through mappings that exist already."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FUTURE_WRITE | fcntl.F_SEAL_SEAL)


def reader_fd(fd: int) -> int:
    """Return a new, read-only descriptor of the same file."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def map_page(fd: int, size: int, *, writable: bool) -> tuple[memoryview, int]:
    """Map the first ``size`` bytes of a file until the process ends; return them as memory, and their address.

    Python's ``mmap`` does not give the address of read-only memory, which a futex needs.  OSError if it is shorter.
    """
    if os.fstat(fd).st_size < size:  # access beyond its end would raise SIGBUS
        raise OSError(f"it has {os.fstat(fd).st_size} bytes; expected {size}")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise last_error()
    view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    return view if writable else view.toreadonly(), address
