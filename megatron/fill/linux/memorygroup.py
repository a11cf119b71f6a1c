"""The control groups (v1 and v2) of a container or batch job that limit this process's memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.linux.cgroup import own_group
from megatron.fill.linux.proc import numbers, text

_NO_LIMIT = 1 << 62  # version 1 reports "no limit" as a number a little below 2**63


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group that can limit memory, of version 1 or 2."""

    path: Path
    version_1: bool

    def room_bytes(self) -> int:
        """The bytes that the group may still take; ``sys.maxsize`` without a limit.

        File pages not used recently count as available, since the kernel reclaims them.  The limit is read each time,
        since it may change.
        """
        stat = numbers(self.path / "memory.stat")
        if self.version_1:
            # The limit of a parent group that is not visible from here is in the group's own statistics.
            limits = [self._number("memory.limit_in_bytes"), stat.get("hierarchical_memory_limit")]
            used, idle = self._number("memory.usage_in_bytes"), "total_inactive_file"  # of child groups too
        else:
            limits, used, idle = [self._number("memory.max")], self._number("memory.current"), "inactive_file"
        cap = min((limit for limit in limits if limit is not None), default=sys.maxsize)
        return sys.maxsize if cap >= _NO_LIMIT else max(0, cap - (used or 0) + stat.get(idle, 0))

    def _number(self, file: str) -> int | None:
        number = text(self.path / file).strip()
        return int(number) if number.isdigit() else None


def memory_groups(proc: Path = Path("/proc")) -> list[MemoryGroup]:
    """This process's group and the groups above it that can limit memory, of both versions."""
    found = []
    for controller, limit in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        own = own_group(proc, controller)
        if not isinstance(own, str):
            found += [MemoryGroup(at, bool(controller)) for at in (own, *own.parents) if (at / limit).exists()]
    return found
