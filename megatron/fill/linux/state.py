"""What the kernel says a process or a thread is at."""

from __future__ import annotations

from pathlib import Path

from megatron.fill.linux.tree import stat_fields


def state_in(stat: Path) -> str:
    """The kernel's letter in such a file of ``/proc`` (proc_pid_stat(5)); X once its process or thread has ended."""
    fields = stat_fields(str(stat))
    return fields[2].decode() if fields else "X"
