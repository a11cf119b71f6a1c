"""Giving up a process's powers: its user, its capabilities, its limits."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import struct
from pathlib import Path

from megatron.fill.linux.libc import error_name, last_error, libc, prctl

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 24, 38, 47
_CLEAR_ALL = 4
_CAPABILITY_VERSION = 0x20080522  # two words for each of the three sets
_LOCKED_BYTES = 64 << 20
_LOCKED_COUNTED_BYTES = 64 << 10  # locked pages of a file cannot be reclaimed, and count for no process
_SIGNALS = 4096  # number of pending signals and timers
_JOBS = 16  # a user's jobs on a node at a time: two beside each of eight ranks


def limit_resources(memory_bytes: int | None, tasks: int, files: int) -> None:
    """Lower limits permanently: memory (None for no cap) and open files of each process, tasks of the user in all."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: files,
        resource.RLIMIT_RTPRIO: 0,  # no scheduling class above the idle one
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_MEMLOCK: _LOCKED_BYTES if memory_bytes is None else _LOCKED_COUNTED_BYTES,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: _SIGNALS,
        resource.RLIMIT_NPROC: tasks,
    }
    if memory_bytes is not None:
        limits[resource.RLIMIT_DATA] = memory_bytes
    for which, value in limits.items():
        _, hard = resource.getrlimit(which)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (least, least))


def be_first_to_die() -> str:
    """Have the kernel kill this process, and those that it starts, first when memory runs out.

    The training's own ``oom_score_adj`` cannot be lowered instead: that takes CAP_SYS_RESOURCE.  Returns an error
    message, or ''.
    """
    try:
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # the highest
    except OSError as error:
        return f"the kernel may end the training instead of a job when memory runs out: {error}"
    return ""


def become(uid: int, gid: int) -> None:
    """Become this user permanently."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def forgo_privileges() -> str:
    """Set no_new_privs: no program that this process starts gains privileges.  Returns an error message, or ''."""
    try:
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
    except OSError as error:
        return f"programs may gain privileges by being started: {error_name(error)}"
    return ""


def bar_powers() -> None:
    """Empty the bounding set: programs started from now on have no capability.  Call it before a change of user."""
    with contextlib.suppress(OSError):
        prctl(_PR_CAP_AMBIENT, _CLEAR_ALL)
    with contextlib.suppress(OSError):  # the last one is reached, or it is not allowed: no_new_privs must then suffice
        for number in itertools.count():
            prctl(_PR_CAPBSET_DROP, number)


def keep_powers(which: int) -> None:
    """Keep only these capabilities of this thread, a mask of the first 32, and none for programs that it starts."""
    effective = permitted = which
    if libc.capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), struct.pack("6I", effective, permitted, 0, 0, 0, 0)):
        raise last_error()


def give_up_powers() -> str:
    """Drop every capability permanently, with no_new_privs set before.  Returns an error message, or ''."""
    try:
        keep_powers(0)
    except OSError as error:
        return f"root keeps its powers over other processes: {error_name(error)}"
    return ""


def hide_memory(hidden: bool) -> None:
    """Hide this process's memory from processes of the same user, or not; a change of user hides it too."""
    prctl(_PR_SET_DUMPABLE, int(not hidden))


def most_tasks(user: int, processes: int) -> int:
    """The limit on a user's processes and threads in all, for one of his jobs, each of which may have ``processes``.

    The kernel counts those of all jobs of the user, also of jobs that begin later, which must not stop this one.  The
    exact limit is the watch over a job's own; this one stops a job that creates them faster than that.
    """
    count = _JOBS * processes
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended in the meantime
                if folder.stat().st_uid == user:
                    count += len(os.listdir(folder / "task"))
    return count
