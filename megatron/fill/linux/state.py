"""The state and the waiting time of a process or thread, as the kernel reports them."""

from __future__ import annotations

from pathlib import Path

from megatron.fill.linux.tree import stat_fields


def state_in(stat: Path) -> str:
    """The state letter in a ``stat`` file of ``/proc`` (proc_pid_stat(5)); X once its process or thread has ended."""
    fields = stat_fields(str(stat))
    return fields[2].decode() if fields else "X"


def waited_ns_in(schedstat: Path) -> int:
    """The time in ns that a thread was ready but had no core, from its ``schedstat``; 0 if the kernel has no such file.

    A wait that has not ended is not included.
    """
    try:
        return int(schedstat.read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
