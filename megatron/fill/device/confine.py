"""The worker's side of its limits: what a process can take from itself before it runs a task."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path

from megatron.fill.device import host
from megatron.fill.device.landlock import enter_scope
from megatron.fill.device.port import Limits
from megatron.fill.device.powers import give_up_powers

_PR_SET_NO_NEW_PRIVS = 38
_FIRST_TO_DIE = 1000  # the highest oom_score_adj
_libc = ctypes.CDLL(None, use_errno=True)


def confine(device: str, limits: Limits) -> list[str]:
    """Hold this process and all that it starts to ``limits``; for good, before any code of the task is run.

    The process must have no other thread yet.  The CUDA side is ``cuda.enter``, once there is a torch.

    Returns:
        What could not be done, and why; the agent's side does not need any of it.
    """
    lacking = []
    if len(os.listdir("/proc/self/task")) > 1:
        lacking.append("a thread that runs already keeps its powers")  # the kernel confines threads one by one
    _limit_resources(device, limits)
    try:
        Path("/proc/self/oom_score_adj").write_text(str(_FIRST_TO_DIE), encoding="ascii")
    except OSError as error:
        lacking.append(f"the kernel may end the training instead of this process when memory runs out: {error}")
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        lacking.append("no_new_privs is not there: programs may gain privileges by being started")
    reason = enter_scope()
    if reason:
        lacking.append(f"signals to other processes are not kept in: {reason}")
    reason = give_up_powers()  # last: the rest may need them
    if reason:
        lacking.append(f"root keeps its powers over other processes: {reason}")
    return lacking


def _limit_resources(device: str, limits: Limits) -> None:
    host.cap_memory(limits.memory_bytes if device == "cpu" else None)
    _lower(resource.RLIMIT_NOFILE, limits.files)
    # The kernel counts all tasks of the user, the training's too, and they may become more; the watch over this
    # worker's own tasks is the exact limit, this one only keeps it from being outrun.
    _lower(resource.RLIMIT_NPROC, _tasks_of(os.getuid()) + 2 * limits.processes)


def _lower(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _tasks_of(user: int) -> int:
    """How many processes and threads a user has."""
    count = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if folder.stat().st_uid == user:
                    count += len(os.listdir(folder / "task"))
    return count
