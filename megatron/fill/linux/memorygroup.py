"""The control groups (v1 and v2) of a container or batch job that limit this process's memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.linux.cgroup import own_group
from megatron.fill.linux.proc import numbers, text

_NO_LIMIT = 1 << 62  # version 1 reports "no limit" as a number a little below 2**63


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a cgroup version that hold limit and usage.

    Attributes:
        limits: files with one number, or names in ``memory.stat``; the smallest limit counts.
        used: file with the usage.
        idle: name in ``memory.stat`` of the file pages not used recently, those of child groups included.
    """

    limits: tuple[str, ...]
    used: str
    idle: str


_VERSIONS = {
    "": _Files(("memory.max",), "memory.current", "inactive_file"),
    # The limit of a parent group that is not visible from here is in the group's own statistics.
    "memory": _Files(
        ("memory.limit_in_bytes", "hierarchical_memory_limit"), "memory.usage_in_bytes", "total_inactive_file"
    ),
}


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group that can limit memory."""

    path: Path
    files: _Files

    def room_bytes(self) -> int:
        """The bytes that the group may still take; ``sys.maxsize`` without a limit.

        File pages not used recently count as available, since the kernel reclaims them.  The limit is read each time,
        since it may change.
        """
        stat = numbers(self.path / "memory.stat")
        limits = [stat.get(name, _number(self.path / name)) for name in self.files.limits]
        cap = min((limit for limit in limits if limit is not None), default=sys.maxsize)
        if cap >= _NO_LIMIT:
            return sys.maxsize
        used = (_number(self.path / self.files.used) or 0) - stat.get(self.files.idle, 0)
        return max(0, cap - used)


def memory_groups(proc: Path = Path("/proc")) -> list[MemoryGroup]:
    """This process's group and the groups above it that can limit memory, of both versions."""
    found = []
    for version_1, files in _VERSIONS.items():
        own = own_group(proc, version_1)
        if not isinstance(own, str):
            groups = (own, *own.parents)
            found += [MemoryGroup(group, files) for group in groups if (group / files.limits[0]).exists()]
    return found


def _number(file: Path) -> int | None:
    number = text(file).strip()
    return int(number) if number.isdigit() else None
