"""Landlock (landlock(7)): permanent rules that restrict signals, tracing, writing and connections.

Landlock needs no privilege once no_new_privs is set.  It is a second layer with namespaces, and the first without:
even a process of the same user, or of root, then cannot signal the rank or the agent, read their memory, or write to
their files.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence

from megatron.fill.linux.libc import error_name, system_call

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_ASK_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _TRUNCATE, _REFER = 1 << 1, 1 << 14, 1 << 13
_MAKE_AND_REMOVE = 0b1_1111_1111 << 4  # removing folders and files, making all kinds
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT_UNIX_SOCKET, _SCOPE_SIGNAL = 1, 2
SCOPES_SINCE, _TCP_SINCE, _TRUNCATE_SINCE, _REFER_SINCE = 6, 4, 3, 2  # first ABI version with each


def landlock_abi() -> int:
    """The kernel's ABI version of Landlock; 0 without Landlock."""
    try:
        return system_call(_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError:
        return 0


def enter_rules(writable: Sequence[str], network: bool) -> str:
    """Apply the rules permanently to the calling thread and all that it starts from now on, but to no other thread.

    Args:
        writable: files, and folders with all that is below them, that may be written; nothing else may.
        network: True to leave TCP unrestricted.

    Returns:
        The reason why this kernel cannot apply all rules, or ''.
    """
    abi = landlock_abi()
    if not abi:
        return "landlock is not there: signals to other processes, and writing, are not kept in by it"
    files = _WRITE_FILE | _MAKE_AND_REMOVE
    files |= _TRUNCATE if abi >= _TRUNCATE_SINCE else 0
    files |= _REFER if abi >= _REFER_SINCE else 0
    tcp = _BIND_TCP | _CONNECT_TCP if abi >= _TCP_SINCE and not network else 0
    scope = _SCOPE_ABSTRACT_UNIX_SOCKET | _SCOPE_SIGNAL if abi >= SCOPES_SINCE else 0
    size = 24 if abi >= SCOPES_SINCE else 16 if abi >= _TCP_SINCE else 8
    try:
        ruleset = system_call(_CREATE_RULESET, struct.pack("QQQ", files, tcp, scope)[:size], size, 0)
        try:
            for path in writable:
                _allow(ruleset, path, files)
            system_call(_RESTRICT_SELF, ruleset, 0)
        finally:
            os.close(ruleset)
    except OSError as error:
        return f"landlock: {error_name(error)}"
    if abi >= SCOPES_SINCE:
        return ""
    return f"landlock has ABI {abi}: signals to other processes are kept in by ABI {SCOPES_SINCE}, Linux 6.12"


def _allow(ruleset: int, path: str, files: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # a path that cannot be opened needs no rule, and must not prevent the others
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            files &= _WRITE_FILE | _TRUNCATE
        rule = struct.pack("=Qi", files, fd)  # packed, unlike other structs of the kernel
        system_call(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(fd)
