"""Giving up root's powers over other processes, and over one's own limits.

A worker of a training that runs as root (in most containers) is root too; without this it could raise its limits
again, and read the memory maps and environments of processes that landlock keeps it from tracing.
"""

from __future__ import annotations

import ctypes
import errno
import struct

_VERSION = 0x20080522  # of the interface: two words for each set
_PR_CAPBSET_DROP = 24
# What a task may want of root stays: files of other users, ports, locked memory, priorities, changing the user.
_GIVEN_UP = {
    "CAP_KILL": 5,
    "CAP_SYS_MODULE": 16,
    "CAP_SYS_RAWIO": 17,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_BOOT": 22,
    "CAP_SYS_RESOURCE": 24,
    "CAP_MAC_OVERRIDE": 32,
    "CAP_MAC_ADMIN": 33,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
    "CAP_CHECKPOINT_RESTORE": 40,
}
_libc = ctypes.CDLL(None, use_errno=True)


def give_up_powers() -> str:
    """Drop the capabilities for good, with no_new_privs set before; why not, if it cannot.

    Those who have none have nothing to give up.
    """
    header = struct.pack("Ii", _VERSION, 0)
    sets = ctypes.create_string_buffer(24)
    if _libc.capget(header, sets):
        return f"capabilities cannot be read: {_error()}"
    words = list(struct.unpack("6I", sets.raw))  # effective, permitted, inheritable: low words, then high words
    if not any(words):
        return ""
    for number in _GIVEN_UP.values():
        _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # needs a power itself; no_new_privs does without it
        for which in range(3):
            words[number // 32 * 3 + which] &= ~(1 << number % 32)
    if _libc.capset(header, ctypes.create_string_buffer(struct.pack("6I", *words), 24)):
        return f"capabilities cannot be given up: {_error()}"
    return ""


def _error() -> str:
    return errno.errorcode.get(ctypes.get_errno(), "unknown")
