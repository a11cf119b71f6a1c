"""Landlock's scopes: a process that enters one can signal, trace and reach only what entered it too.

Even a process of the same user, or root's, then cannot send a signal to the rank or the agent, read their memory, or
connect to their abstract unix sockets.  See landlock(7); needs Linux 6.12, and no privilege once no_new_privs is set.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # the same on every architecture
_ASK_VERSION = 1
_SCOPE_ABSTRACT_UNIX_SOCKET, _SCOPE_SIGNAL = 1, 2
SCOPES_SINCE = 6  # the ABI
_libc = ctypes.CDLL(None, use_errno=True)


def landlock_abi() -> int:
    """The kernel's version of the interface; 0 where there is none."""
    return max(0, _libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(_ASK_VERSION)))


def enter_scope() -> str:
    """Enter a scope for good, with all that this thread starts from now on; why not, if it cannot.

    It counts for the calling thread: call it before the process has others.
    """
    abi = landlock_abi()
    if abi < SCOPES_SINCE:
        found = f"has ABI {abi}" if abi else "is not there"
        return f"landlock {found}: scopes need ABI {SCOPES_SINCE}, Linux 6.12"
    ruleset = struct.pack("QQQ", 0, 0, _SCOPE_ABSTRACT_UNIX_SOCKET | _SCOPE_SIGNAL)
    fd = _libc.syscall(ctypes.c_long(_CREATE_RULESET), ruleset, ctypes.c_size_t(len(ruleset)), ctypes.c_uint(0))
    if fd < 0:
        return f"landlock: {errno.errorcode.get(ctypes.get_errno(), 'failed')}"
    try:
        if _libc.syscall(ctypes.c_long(_RESTRICT_SELF), ctypes.c_int(fd), ctypes.c_uint(0)):
            return f"landlock: {errno.errorcode.get(ctypes.get_errno(), 'failed')}"
    finally:
        os.close(fd)
    return ""
