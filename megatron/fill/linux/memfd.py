"""Shared memory without a name: anonymous files that nothing leaves behind and nobody can cut short."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from megatron.fill.linux.libc import last_error, libc

_FUTURE_WRITE = 0x0010  # F_SEAL_FUTURE_WRITE, which Python's fcntl does not name

libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)


def create(name: str, size: int, *, sealable: bool = False) -> int:
    """The descriptor of a new file of ``size`` zero bytes, for its owner only.

    It cannot shrink, or a page could be taken away from under who uses it.

    Args:
        name: for people who look into /proc.
        sealable: ``close_to_writers`` is still to come.
    """
    fd = os.memfd_create(f"pipefill-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    if not sealable:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    return fd


def close_to_writers(fd: int) -> None:
    """Whoever has it mapped may go on writing; nobody can write to it in any other way from now on."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FUTURE_WRITE | fcntl.F_SEAL_SEAL)


def reader_fd(fd: int) -> int:
    """A new descriptor through which nothing can be written."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def map_page(fd: int, size: int, *, writable: bool) -> tuple[memoryview, int]:
    """The first ``size`` bytes of a file as memory, and its address; mapped until the process ends.

    Python's own ``mmap`` does not tell the address of memory that cannot be written to, which a futex needs.

    Raises:
        OSError: it cannot be mapped so, or is shorter.
    """
    if os.fstat(fd).st_size < size:  # beyond its end there is no memory but a SIGBUS
        raise OSError(f"it has {os.fstat(fd).st_size} bytes; expected {size}")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise last_error()
    view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    return view if writable else view.toreadonly(), address
