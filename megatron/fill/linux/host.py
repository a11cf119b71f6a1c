"""What Linux gives us to keep a worker out of the main job's way, and to take it down with it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from pathlib import Path

from megatron.fill.linux.libc import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl


def die_with_parent(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when its parent dies.  ``parent`` is the pid that the parent was known by."""
    prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none can slip away."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def yield_to_main_job(cpus: list[int] | None = None) -> None:
    """Run this process only when nothing else wants its cores, and only on those of the rank it serves.

    A waking rank then takes the core back at once, even from a step in flight.  The scheduling class counts only
    inside one autogroup, so the worker must stay in its parent's session.
    """
    if cpus:
        with contextlib.suppress(OSError):  # the cores may have been taken from us since
            os.sched_setaffinity(0, cpus)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def ignore_notices() -> None:
    """Ignore, with all that this process starts, what a batch system sends to every process before a time limit.

    SLURM's ``--signal=USR2@60`` means the main job; whoever does not expect it would die of it.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def signal_name(number: int) -> str:
    """What a signal is called; real-time ones have a number only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def use_every_core() -> None:
    """Undo a pinning that was inherited."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def cap_memory(memory_bytes: int | None) -> None:
    """Make allocations beyond ``memory_bytes`` of private memory fail in this process and its children."""
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class FreeHostMemory:
    """The machine's available memory in bytes.

    Args:
        rest_s: for how long a reading is taken to hold, where many ask and none needs it to be exact.
    """

    def __init__(self, rest_s: float = 0, meminfo: str = "/proc/meminfo") -> None:
        self._rest_ns = round(rest_s * 1e9)
        self._fd = os.open(meminfo, os.O_RDONLY | os.O_CLOEXEC)
        self._read_ns = 0
        self._bytes = 0

    def __call__(self) -> int:
        now_ns = time.monotonic_ns()
        if not self._read_ns or now_ns - self._read_ns >= self._rest_ns:
            text = os.pread(self._fd, 512, 0)
            start = text.index(b"MemAvailable:") + len(b"MemAvailable:")
            self._bytes = int(text[start : text.index(b"kB", start)]) * 1024
            self._read_ns = now_ns
        return self._bytes


def may_become(uid: int, gid: int, proc: Path = Path("/proc/self")) -> bool:
    """Whether this root's user namespace, perhaps a rootless container's, has that user and group, and lets root leave
    its own groups.

    Args:
        proc: for tests.
    """
    try:
        users, groups = ((proc / name).read_text(encoding="ascii") for name in ("uid_map", "gid_map"))
        leaves = (proc / "setgroups").read_text(encoding="ascii").strip() == "allow"
    except OSError:  # no /proc, or a kernel without user namespaces
        return True
    return leaves and _has(uid, users) and _has(gid, groups)


def _has(number: int, ranges: str) -> bool:
    rows = (line.split() for line in ranges.splitlines())
    return any(int(first) <= number < int(first) + int(count) for first, _, count in rows)
