"""Calls for mounts and capabilities that Python lacks."""

from __future__ import annotations

import ctypes

from megatron.fill.linux.libc import last_error, libc

_MNT_DETACH = 2


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2).

    Raises:
        OSError: the kernel refused it.
    """
    words = [text.encode() if text else None for text in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None):
        raise last_error(target)


def unmount(target: str) -> None:
    """Call umount2(2) to detach ``target`` at once, even while it is in use.

    Raises:
        OSError: the kernel refused it.
    """
    if libc.umount2(target.encode(), _MNT_DETACH):
        raise last_error(target)


def capabilities(sets: bytes | None = None) -> bytes:
    """Set this thread's capability sets if ``sets`` is given; return the three sets as six words (capget(2)).

    Raises:
        OSError: the kernel refused it.
    """
    header = (0x20080522).to_bytes(4, "little") + bytes(4)  # two words for each set; this thread
    buffer = ctypes.create_string_buffer(sets or bytes(24), 24)
    if (libc.capset if sets is not None else libc.capget)(header, buffer):
        raise last_error()
    return buffer.raw
