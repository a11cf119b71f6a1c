"""What the kernel says a process or a thread is at."""

from __future__ import annotations

from pathlib import Path

from megatron.fill.linux.tree import stat_fields


def state_in(stat: Path) -> str:
    """The kernel's letter in such a file of ``/proc`` (proc_pid_stat(5)); X once its process or thread has ended."""
    fields = stat_fields(str(stat))
    return fields[2].decode() if fields else "X"


def waited_ns_in(schedstat: Path) -> int:
    """How long the thread of such a file of ``/proc`` has been ready without a core; 0 where no kernel tells.

    A wait that goes on is not in it.
    """
    try:
        return int(schedstat.read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
