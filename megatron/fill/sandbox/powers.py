"""Giving up what a process may do by who it is: its user, its capabilities, its limits."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import struct
from pathlib import Path

from megatron.fill.linux.libc import prctl
from megatron.fill.sandbox.calls import capabilities

_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 8, 24, 38, 47
_CLEAR_ALL = 4
_CAP_SYS_NICE = 1 << 23
_FIRST_TO_DIE = 1000  # the highest oom_score_adj
_LOCKED_BYTES = 64 << 20
_LOCKED_COUNTED_BYTES = 64 << 10  # a file's pages are nobody's until they are locked
_SIGNALS = 4096  # that wait, and timers


def limit_resources(memory_bytes: int | None, tasks: int, files: int) -> None:
    """Lower this process's limits for good.

    Args:
        memory_bytes: of private memory, of each process; None for no cap.
        tasks: processes and threads, all those of its user counted.
    """
    if memory_bytes is not None:
        _lower(resource.RLIMIT_DATA, memory_bytes)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, files)
    _lower(resource.RLIMIT_RTPRIO, 0)  # no scheduling class above the idle one
    _lower(resource.RLIMIT_NICE, 0)
    _lower(resource.RLIMIT_MEMLOCK, _LOCKED_BYTES if memory_bytes is None else _LOCKED_COUNTED_BYTES)
    _lower(resource.RLIMIT_MSGQUEUE, 0)
    _lower(resource.RLIMIT_SIGPENDING, _SIGNALS)
    _lower(resource.RLIMIT_NPROC, tasks)


def be_first_to_die() -> list[str]:
    """Have the kernel end this process, and what it starts from now on, first when memory runs out; why not.

    The training's own standing cannot be raised instead: a lower ``oom_score_adj`` than one has takes CAP_SYS_RESOURCE.
    """
    try:
        Path("/proc/self/oom_score_adj").write_text(str(_FIRST_TO_DIE), encoding="ascii")
    except OSError as error:
        return [f"the kernel may end the training instead of a job when memory runs out: {error}"]
    return []


def become(uid: int, gid: int, keeping: bool = False) -> None:
    """Become this user for good.

    Args:
        keeping: the capabilities are not lost with that, and have to be given up.

    Raises:
        OSError: the kernel refused it.
    """
    prctl(_PR_SET_KEEPCAPS, int(keeping))
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def forgo_privileges() -> str:
    """Nothing that this process starts may gain privileges by being started; why not, if that cannot be."""
    try:
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
    except OSError as error:
        return f"programs may gain privileges by being started: {_name(error)}"
    return ""


def bar_powers() -> None:
    """No program that is started from now on can have a capability; before a change of user, who may not do this."""
    with contextlib.suppress(OSError):
        prctl(_PR_CAP_AMBIENT, _CLEAR_ALL)
    number = 0
    with contextlib.suppress(OSError):  # the last one is reached, or it needs a power itself: no_new_privs does without
        while True:
            prctl(_PR_CAPBSET_DROP, number)
            number += 1


def give_up_powers(real_time: bool = False) -> str:
    """Drop every capability for good, with no_new_privs set before; why not, if it cannot.

    Args:
        real_time: all but that one to choose a scheduling class, which programs that it starts do not have either.
    """
    kept = _CAP_SYS_NICE if real_time else 0
    try:
        capabilities(struct.pack("6I", kept, kept, 0, 0, 0, 0))  # effective, permitted, inheritable
    except OSError as error:
        return f"root keeps its powers over other processes: {_name(error)}"
    return ""


def hide_memory(hidden: bool) -> None:
    """Whether processes of the same user may look into this one; a change of user hides it."""
    prctl(_PR_SET_DUMPABLE, int(not hidden))


def _lower(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def tasks_of(user: int) -> int:
    """How many processes and threads a user has, as far as this process can see."""
    count = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if folder.stat().st_uid == user:
                    count += len(os.listdir(folder / "task"))
    return count


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "failed")
