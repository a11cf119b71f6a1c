"""Settings of a worker's process: how it stays out of the training's way, its end with its parent, its variables."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megatron.fill.linux.libc import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from megatron.fill.linux.proc import numbers, stat_fields

_REST_NS = 250_000_000


def die_with_parent(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when its parent dies.  ``parent`` is the parent's pid, known from before."""
    prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none escapes."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def yield_to_main_job(cpus: list[int] | None = None) -> None:
    """Run this process only when nothing else needs its cores (SCHED_IDLE), and only on ``cpus``, those of its rank.

    A rank that wakes up then gets its core at once, even from a running step.  The scheduling class has an effect only
    within an autogroup, so the worker must stay in its parent's session.
    """
    if cpus:
        with contextlib.suppress(OSError):  # the cores may have been taken from us since
            os.sched_setaffinity(0, cpus)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def ignore_notices() -> None:
    """Ignore the signals that a batch system sends to every process before a time limit; children inherit that.

    SLURM's ``--signal=USR2@60`` is meant for the training; a process without a handler would die of it.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def yield_to_other_sessions() -> None:
    """Give this session a tenth of the weight of others, where the kernel groups processes by session (autogroups)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("10", encoding="ascii")


def process_started_ns() -> int:
    """Return the time at which this process was started, or forked, in ns of CLOCK_MONOTONIC; accurate to 10 ms."""
    ticks = int(stat_fields("/proc/self/stat")[21])
    since_boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return time.monotonic_ns() - (since_boot_ns - ticks * 10**9 // os.sysconf("SC_CLK_TCK"))


def unordered(machine: str | None = None) -> str:
    """The reason why shared pages cannot be read without locks on this architecture; empty if they can.

    x86-64 keeps stores in order.  aarch64 and ppc64le need a memory barrier, which Python does not have.
    """
    machine = machine or platform.machine()
    if machine == "x86_64":
        return ""
    return f"this processor is {machine}, which reorders stores to shared memory; expected x86_64"


def how_ended(code: int) -> str:
    """Return how a process ended, by its exit code, which is negative after a signal."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"was ended by {name}"


def use_every_core() -> None:
    """Undo an inherited CPU affinity."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def cap_memory(memory_bytes: int | None) -> None:
    """Switch off core dumps, and make allocations beyond ``memory_bytes`` (None: any) of private memory fail.

    That applies to this process and to each child.
    """
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def free_host_bytes(meminfo: str = "/proc/meminfo") -> int:
    """The machine's available memory in bytes."""
    return 1024 * numbers(meminfo)["MemAvailable"]


class FreeHostMemory:
    """A callable that returns the machine's available memory in bytes; a reading is reused for 0.25 s."""

    def __init__(self) -> None:
        self._read_ns = self._bytes = 0

    def __call__(self) -> int:
        now_ns = time.monotonic_ns()
        if now_ns - self._read_ns > _REST_NS:
            self._read_ns, self._bytes = now_ns, free_host_bytes()
        return self._bytes


def may_become(uid: int, gid: int, proc: Path = Path("/proc/self")) -> bool:
    """True if this process, as root, can become that user and group.

    Its user namespace, perhaps a rootless container's, has to map both and allow setgroups(2).
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


def apply_environment(job: Mapping[str, str]) -> None:
    """Set the job's own variables, inside its sandbox.

    Variables that the interpreter and the dynamic loader read at the start of a program take effect in programs that
    the job starts; PYTHONPATH takes effect in the job itself, too.
    """
    os.environ.update(job)
    sys.path.extend(folder for folder in job.get("PYTHONPATH", "").split(os.pathsep) if folder)
