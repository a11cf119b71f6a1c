"""Mounts and capabilities, which Python has no names for."""

from __future__ import annotations

import ctypes

from megatron.fill.linux.libc import last_error, libc

_MNT_DETACH = 2


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2).

    Raises:
        OSError: the kernel refused it.
    """
    words = [text.encode() if text else None for text in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None):
        raise last_error(target)


def unmount(target: str) -> None:
    """umount2(2), at once, whoever still uses it.

    Raises:
        OSError: the kernel refused it.
    """
    if libc.umount2(target.encode(), _MNT_DETACH):
        raise last_error(target)


def capabilities(sets: bytes | None = None) -> bytes:
    """The three sets of this thread's capabilities as six words (capget(2)), after setting them if given.

    Raises:
        OSError: the kernel refused it.
    """
    header = (0x20080522).to_bytes(4, "little") + bytes(4)  # two words for each set; this thread
    buffer = ctypes.create_string_buffer(sets or bytes(24), 24)
    if (libc.capset if sets is not None else libc.capget)(header, buffer):
        raise last_error()
    return buffer.raw
