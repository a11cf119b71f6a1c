"""Attacks on the memory cap: memory that the address space of a process does not show.  All are small."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron.fill.linux.libc import libc
from tests.chaos.attacks.base import Attack, Ground, Refused, try_all
from tests.chaos.attacks.calls import syscall
from tests.chaos.kind import MIB, FaultKind, attack

_MOST, _CAP, _CHUNK = 400 * MIB, 256 * MIB, 8 * MIB
_PRIVATE, _CREATE = 0, 0o1000  # IPC_PRIVATE, IPC_CREAT
_KEPT_S, _PAUSE_S, _SEEN_S = 6.0, 0.02, 1.5
_PAGE, _TABLE = 4096, 2 * MIB  # a page of tables maps so much
_F_SETPIPE_SZ = 1031
_held: list[object] = []  # until the process ends


def hold(part: Callable[[int], object], ground: Ground) -> str:
    """Take one part after the other, up to 400 MiB; the parts are kept until the process ends.

    Raises:
        OSError: a part was refused.
    """
    for number in range(_MOST // _CHUNK):
        _held.append(part(number))
        time.sleep(_PAUSE_S)
    time.sleep(_SEEN_S)  # a periodic watch has seen it by now
    return f"{_MOST // MIB} MiB"


def _system_v(number: int) -> object:
    """A System V segment that is written, and no longer mapped."""
    segment = syscall("shmget", _PRIVATE, _CHUNK, _CREATE | 0o600)
    libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    address = libc.shmat(segment, None, 0)
    ctypes.memset(address, 1, _CHUNK)
    libc.shmdt(ctypes.c_void_p(address))
    return segment


def _file(number: int, fd: int) -> int:
    for _ in range(_CHUNK // MIB):
        os.write(fd, bytes(MIB))
    return fd


def _deleted(number: int) -> object:
    """A deleted file in memory."""
    fd, path = tempfile.mkstemp(dir="/dev/shm")
    os.unlink(path)
    return _file(number, fd)


def _in_flight(number: int) -> object:
    """A memory file that is only in an unread message."""
    ours, theirs = socket.socketpair()
    fd = _file(number, os.memfd_create("flying"))
    socket.send_fds(ours, [b"x"], [fd])
    os.close(fd)
    return ours, theirs


def _cycle(number: int) -> object:
    """A socket and a memory file that are only in a message in the socket itself: no process has a descriptor."""
    ours, theirs = socket.socketpair()
    fd = _file(number, os.memfd_create("flying"))
    socket.send_fds(ours, [b"x"], [fd, ours.fileno(), theirs.fileno()])
    for one in (ours, theirs):
        one.close()
    os.close(fd)
    return None


def _shared(number: int) -> object:
    """Shared anonymous memory."""
    held = mmap.mmap(-1, _CHUNK)
    held.write(b"x" * _CHUNK)
    return held


def _zero_device(number: int) -> object:
    fd = os.open("/dev/zero", os.O_RDWR)
    held = mmap.mmap(fd, _CHUNK)
    held.write(b"x" * _CHUNK)
    os.close(fd)
    return held


def _tables_of_pages(number: int) -> object:
    """A page read in every two MiB: hardly any memory, but a page of tables for each."""
    span = _CHUNK // _PAGE * _TABLE
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, span, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(12, "mmap")
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(span), 15)  # MADV_NOHUGEPAGE
    for at in range(address, address + span, _TABLE):
        ctypes.c_char.from_address(at).value  # noqa: B018
    return address


def _children(number: int) -> object:
    """Memory that a child writes after a fork."""
    pid = os.fork()
    if pid == 0:
        held = bytearray(b"x" * _CHUNK)
        time.sleep(_KEPT_S if held else 0)
        os._exit(0)
    return pid


def _stack(number: int) -> object:
    """The stack of a sleeping thread, written from end to end."""
    threading.stack_size(_CHUNK + 2 * MIB)

    def sleep() -> None:
        attributes, at, size = (ctypes.c_char * 128)(), ctypes.c_void_p(), ctypes.c_size_t()
        libc.pthread_self.restype = ctypes.c_void_p
        libc.pthread_getattr_np(ctypes.c_void_p(libc.pthread_self()), attributes)
        libc.pthread_attr_getstack(attributes, ctypes.byref(at), ctypes.byref(size))
        ctypes.memset((at.value or 0) + 64 * 1024, 1, _CHUNK)  # far below what is in use
        time.sleep(_KEPT_S)

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    return thread


def _between_looks(ground: Ground) -> str:
    """Memory over the cap, released before a periodic watch is likely to see it, again and again."""
    end_s = time.monotonic() + _KEPT_S / 2
    held = mmap.mmap(-1, _MOST, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    while time.monotonic() < end_s:
        ctypes.memset(address, 1, _MOST)
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_MOST), mmap.MADV_DONTNEED)
        time.sleep(0.02)
    return f"{_MOST // MIB} MiB for moments"


def _freed(ground: Ground) -> str:
    """Memory that is marked as unneeded (MADV_FREE) and still there."""

    def part(number: int) -> object:
        held = mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        held.write(b"x" * _CHUNK)
        held.madvise(8)
        return held

    return hold(part, ground)


def _secret(ground: Ground) -> str:
    """Memory that not even the kernel has mapped, and that cannot be swapped out."""

    def take() -> None:
        fd = syscall("memfd_secret", 0)
        os.ftruncate(fd, 128 * MIB)
        held = mmap.mmap(fd, 128 * MIB)
        held.write(b"x" * (128 * MIB))
        _held.append(held)

    # Beyond what may be locked, the write ends the process that makes it: a child.
    pid = os.fork()
    if pid == 0:
        try:
            take()
            os._exit(0)
        except (OSError, ValueError):
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        raise Refused("128 MiB of secret memory could not be had")
    return "128 MiB"


def _huge(ground: Ground) -> str:
    """Huge pages that were reserved for others."""
    return try_all([("MAP_HUGETLB", lambda: _held.append(mmap.mmap(-1, _TABLE, flags=0x22 | 0x40000)))])


def _big_pipes(number: int) -> object:
    read, write = os.pipe()
    fcntl.fcntl(write, _F_SETPIPE_SZ, MIB)
    os.set_blocking(write, False)
    os.write(write, bytes(MIB))
    return read, write


def _pipes(ground: Ground) -> str:
    """Full pipes of a mebibyte, more than one user may have."""

    def fill() -> None:
        _held.extend(_big_pipes(number) for number in range(300))

    return try_all([("300 pipes", fill)])


def _socket_buffers(ground: Ground) -> str:
    """Unread messages in as many sockets as there are descriptors for."""
    sent = 0
    try:
        for _ in range(200):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            _held.append((ours, theirs))
            ours.setblocking(False)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * MIB)
            try:
                while True:
                    sent += ours.send(bytes(64 * 1024))
            except BlockingIOError:
                continue
    except OSError:
        pass
    return f"{sent // MIB} MiB in sockets"


def _areas(ground: Ground) -> str:
    """Tens of thousands of memory areas of one page, near the limit for a process."""
    span = 60_000 * _PAGE
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, span, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    for at in range(address, address + span, 2 * _PAGE):
        if libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(_PAGE), 0):
            break
    return f"{sum(1 for _ in Path('/proc/self/maps').open('rb'))} areas"


def _attributes(ground: Ground) -> str:
    """Extended attributes, which do not count towards the files' size."""

    def part() -> None:
        for number in range(400):
            path = Path(f"/dev/shm/attributes-{os.getpid()}-{number}")
            path.touch()
            os.setxattr(path, "user.x", bytes(60 * 1024))

    return try_all([("24 MiB of attributes", part)])


def _capped(kind: FaultKind) -> FaultKind:
    """The kind with a cap of 256 MiB: the kernel refuses a part, or the job is ended before it has all."""
    return replace(kind, memory_bytes=_CAP)


def _tables() -> Iterator[Attack]:
    refused, either = partial(attack, refused=True), partial(attack, either=True)
    parts: tuple[tuple[str, str, Callable[[int], object]], ...] = (
        ("system-v", "400 MiB in segments of System V that are not mapped", _system_v),
        ("deleted-files", "400 MiB in files in memory without a name", _deleted),
        ("in-flight", "400 MiB in memory files that only messages hold", _in_flight),
        ("in-cycles", "400 MiB in memory files in sockets that hold themselves", _cycle),
        ("shared-memory", "400 MiB shared without a file", _shared),
        ("zero-device", "400 MiB of /dev/zero, shared", _zero_device),
        ("page-tables", "400 MiB of page tables", _tables_of_pages),
        ("children-memory", "400 MiB, of children", _children),
        ("stacks", "400 MiB on the stacks of threads that sleep", _stack),
    )
    for name, what, part in parts:
        yield Attack(_capped(refused(f"memory-{name}", what, either=True)), partial(hold, part))
    freed = either("memory-freed", "400 MiB that it says it does not need (MADV_FREE)")
    yield Attack(_capped(freed), _freed)
    moments = either("memory-moments", "400 MiB for moments, between two looks")
    yield Attack(_capped(moments), _between_looks, 1.0)
    yield Attack(refused("memory-secret", "128 MiB of memfd_secret"), _secret)
    yield Attack(refused("memory-huge", "huge pages"), _huge)
    yield Attack(refused("memory-pipes", "300 pipes of a mebibyte"), _pipes)
    yield Attack(either("memory-sockets", "messages that nobody reads"), _socket_buffers, 1.0)
    yield Attack(either("memory-areas", "30,000 areas of memory of a page each"), _areas, 1.0)
    yield Attack(either("memory-attributes", "24 MiB in attributes of files"), _attributes, 1.0)


ATTACKS = tuple(_tables())
