"""Mounts as descriptors (Linux 5.12): taken first, changed while they are invisible, then put in place."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from pathlib import Path

from megatron.fill.linux.libc import last_error, libc, system_call

# The same numbers on every architecture that Linux got since 2019, and on x86-64.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_CLONE, _RECURSIVE, _EMPTY_PATH, _NO_FOLLOW = 0x1, 0x8000, 0x1000, 0x100
_AT_FDCWD = -100
_FROM_EMPTY_PATH = 0x4
READ_ONLY, NO_SETUID, NO_DEVICES, NO_PROGRAMS = 0x1, 0x2, 0x4, 0x8
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x4000, 0x40000, 2


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = [word.encode() if word else None for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None):
        raise last_error(target)


def make_private() -> None:
    """Stop the propagation of mounts between this namespace and the outside, in both directions."""
    mount("", "/", "", _MS_REC | _MS_PRIVATE)


def take(path: str) -> int:
    """Clone the mount at ``path``, with all below it; return its descriptor.  A link at the end is not followed."""
    flags = _CLONE | _RECURSIVE | _NO_FOLLOW | os.O_CLOEXEC
    return system_call(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags)


def put(fd: int, path: str) -> None:
    """Mount the descriptor ``fd`` of ``take`` at ``path``, which is created if necessary, and close ``fd``."""
    place = Path(path)
    try:
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            make = place.mkdir if stat.S_ISDIR(os.fstat(fd).st_mode) else place.touch
            make()
        system_call(_MOVE_MOUNT, fd, b"", _AT_FDCWD, os.fsencode(path), _FROM_EMPTY_PATH)
    finally:
        os.close(fd)


def restrict(at: int | str, flags: int, recursive: bool = True) -> None:
    """Add restrictions to a mount, given by a descriptor of ``take`` or by the path where it is mounted."""
    path, fd = (b"", at) if isinstance(at, int) else (os.fsencode(at), _AT_FDCWD)
    how = (_RECURSIVE if recursive else 0) | (_EMPTY_PATH if isinstance(at, int) else 0)
    attributes = struct.pack("=4Q", flags, 0, 0, 0)  # set, clear, propagation, user namespace
    system_call(_MOUNT_SETATTR, fd, path, how, attributes, len(attributes))


def new_memory(path: str, options: str) -> None:
    """Mount a new file system in memory at ``path``."""
    mount("tmpfs", path, "tmpfs", NO_SETUID, options)  # mount(2) has the same bit for this flag


def detach(path: str) -> None:
    """Unmount the latest mount at ``path``, even while it is in use; clones that were taken from it stay."""
    if libc.umount2(path.encode(), _MNT_DETACH):
        raise last_error(path)
