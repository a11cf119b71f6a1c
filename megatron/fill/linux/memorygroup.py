"""The control groups, of both versions, that cap the memory of this process from outside: a container, a batch job."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.linux.cgroup import own_group

_NO_LIMIT = 1 << 62  # version 1 says a number a little below 2**63


@dataclass(frozen=True, slots=True)
class _Files:
    """Where a version says it.

    Attributes:
        limits: files of one number, or names in ``memory.stat``; the least counts.
        idle: the pages of files that nobody has used of late, with those of the groups below, in ``memory.stat``.
    """

    limits: tuple[str, ...]
    used: str
    idle: str


_VERSIONS = {
    "": _Files(("memory.max",), "memory.current", "inactive_file"),
    # What a group above one allows that cannot be seen from here is in the group's own statistics.
    "memory": _Files(
        ("memory.limit_in_bytes", "hierarchical_memory_limit"), "memory.usage_in_bytes", "total_inactive_file"
    ),
}


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One of them."""

    path: Path
    files: _Files

    def room_bytes(self) -> int:
        """What it may still take: a file's pages that nobody uses are given back for it; no limit is a large number.

        A limit may come, change or go at any time.
        """
        stat = _numbers(self.path / "memory.stat")
        limits = [stat.get(name, _number(self.path / name)) for name in self.files.limits]
        cap = min((limit for limit in limits if limit is not None), default=sys.maxsize)
        if cap >= _NO_LIMIT:
            return sys.maxsize
        used = (_number(self.path / self.files.used) or 0) - stat.get(self.files.idle, 0)
        return max(0, cap - used)


def memory_groups(proc: Path = Path("/proc")) -> list[MemoryGroup]:
    """This process's group and those above it that can limit their memory, of either version."""
    found = []
    for version_1, files in _VERSIONS.items():
        own = own_group(proc, version_1)
        if not isinstance(own, str):
            groups = (own, *own.parents)
            found += [MemoryGroup(group, files) for group in groups if (group / files.limits[0]).exists()]
    return found


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _numbers(file: Path) -> dict[str, int]:
    """A file of names and numbers."""
    pairs = [line.split() for line in _read(file).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
