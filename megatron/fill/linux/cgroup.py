"""A control group (v2) for each worker, if this process may create one, and those that limit this process's memory.

The parent of the workers' groups is, in this order of preference:

1. The parent of our own group, if it was delegated to us and enables its controllers for its children: the worker's
   group becomes a sibling of ours.  That is so under a user's systemd (``systemd-run --user --scope``).
2. Our own group.  It holds processes, so by cgroup v2's "no internal processes" rule it enables no controller for its
   children (the root of the hierarchy may); a group in it can still be frozen and killed as a whole.

Where systemd runs, it alone manages a group that it did not delegate, even if we are root.  Only groups created here
are ever changed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.linux.proc import number, numbers, text

_PREFIX = "pipefill-"
_STALE_S = 60.0  # a group that is empty for longer than a worker takes to start was left by a killed agent
_NO_LIMIT = 1 << 62  # version 1 reports "no limit" as a number a little below 2**63
_REMOVE_S = 0.5  # time that killed processes may take to leave it; ``kill`` waits for that


@dataclass(frozen=True, slots=True)
class CgroupHome:
    """The place where workers' groups can be created."""

    path: Path | None  # parent of the groups; None if no group can be created
    controllers: frozenset[str] = frozenset()  # those that the groups will have: ``memory``, ``pids``, ``cpu``, ...
    why: str = ""  # reason why there is no place, or why ``memory`` or ``pids`` is missing

    @property
    def binds_memory(self) -> bool:
        return self.path is not None and "memory" in self.controllers

    @property
    def binds_processes(self) -> bool:
        return self.path is not None and "pids" in self.controllers


def find_home(proc: Path = Path("/proc"), systemd: bool | None = None) -> CgroupHome:
    """The best place for workers' groups that this process may use; arguments pretend another machine, for tests."""
    own = own_group(proc)
    if isinstance(own, str):
        return CgroupHome(None, why=own)
    if systemd is None:
        systemd = Path("/run/systemd/system").is_dir()
    if systemd and not _is_delegated(own):
        return CgroupHome(None, why="systemd manages this group; start with systemd-run --scope -p Delegate=yes")
    if not (own / "cgroup.type").exists():  # the root, which may hold processes and still enable controllers
        return _usable(own, "the root group does not hand down")
    parent = own.parent
    if (parent / "cgroup.type").exists() and (not systemd or _is_delegated(parent)):
        home = _usable(parent, "its parent does not hand down")
        if home.binds_memory:
            return home
    return _usable(own, "a group that holds processes cannot hand down")


def _usable(path: Path, why: str) -> CgroupHome:
    """The home at ``path``, if that is writable; ``why`` explains missing controllers."""
    if not all(os.access(file, os.W_OK) for file in (path, path / "cgroup.procs")):
        return CgroupHome(None, why="the control groups are not writable for this user")
    controllers = frozenset(text(path / "cgroup.subtree_control").split())
    lacking = [name for name in ("memory", "pids") if name not in controllers]
    return CgroupHome(path, controllers, f"{why} {' and '.join(lacking)}" if lacking else "")


def own_group(proc: Path, version_1: str = "") -> Path | str:
    """The folder of this process's group, in version 2 or in a controller's hierarchy of version 1; or why not."""
    name = f"cgroup v1 with {version_1}" if version_1 else "cgroup v2"
    mounts = [line.split() for line in text(proc / "self/mountinfo").splitlines()]
    found = [(Path(m[4]), m[3]) for m in mounts if _is_hierarchy(m[m.index("-") + 1 :], version_1)]
    if not found:
        return f"{name} is not mounted"
    mount, root = found[0]
    fields = [line.split(":", 2) for line in text(proc / "self/cgroup").splitlines()]
    lines = [path for _, controllers, path in fields if version_1 in controllers.split(",")]
    inside = lines[0] if lines else "/"
    relative = os.path.relpath(inside, root)
    if inside.startswith("/..") or relative.startswith(".."):
        return "this process's control group lies outside of what is mounted here"
    return mount if relative == "." else mount / relative


def _is_hierarchy(mounted: list[str], version_1: str) -> bool:
    """True if a mount (type, source and options from mountinfo(5)) is that hierarchy."""
    if not version_1:
        return mounted[0] == "cgroup2"
    return mounted[0] == "cgroup" and version_1 in mounted[-1].split(",")


def _is_delegated(path: Path) -> bool:
    """True if systemd delegated this group, or one above it."""
    for place in (path, *path.parents):
        for name in ("user.delegate", "trusted.delegate"):
            with contextlib.suppress(OSError):
                if os.getxattr(place, name) == b"1":
                    return True
    return False


class Cgroup:
    """A worker's group, created in a home with a path; the kernel enforces the limits for which that has controllers.

    OSError if it cannot be created.
    """

    def __init__(self, home: CgroupHome, name: str, memory_bytes: int | None, processes: int) -> None:
        assert home.path is not None
        self.path = home.path / f"{_PREFIX}{name}"
        _sweep(home.path)
        self.binds_memory = home.binds_memory and memory_bytes is not None
        with contextlib.suppress(FileExistsError):  # left by a run that was killed; its limits are written again
            self.path.mkdir()
        try:
            if home.binds_memory:
                (self.path / "memory.max").write_text("max" if memory_bytes is None else str(memory_bytes))
                self._write("memory.swap.max", "0")  # else the cap only pushes the worker out to disk
                self._write("memory.oom.group", "1")
            if home.binds_processes:
                (self.path / "pids.max").write_text(str(processes))
            if "cpu" in home.controllers and not self._write("cpu.idle", "1"):
                # The group competes as a whole with the training's; SCHED_IDLE has an effect only within the group.
                (self.path / "cpu.weight").write_text("1")
        except OSError:
            self.close()
            raise

    def add(self, pid: int) -> bool:
        return self._write("cgroup.procs", str(pid))

    def processes(self) -> list[int]:
        return [int(pid) for pid in text(self.path / "cgroup.procs").split() if pid != "0"]

    def kill(self) -> bool:
        """Kill all processes in it at once, also those being forked; False if the kernel cannot (before 5.14)."""
        return self._write("cgroup.kill", "1")

    def freeze(self) -> bool:
        return self._write("cgroup.freeze", "1")

    def held_bytes(self) -> int:
        """The memory of the processes without file pages, which the kernel reclaims when memory is needed."""
        stat = numbers(self.path / "memory.stat")
        return stat.get("anon", 0) + stat.get("shmem", 0)

    def busy_s(self) -> float | None:
        """The CPU time in s used in the group; None if the kernel does not report it."""
        stat = numbers(self.path / "cpu.stat")
        return stat.get("usage_usec", 0) / 1e6 if stat else None

    def peak_bytes(self) -> int:
        """The peak of the memory that ``memory.max`` limits; 0 if the kernel does not report it (before 5.19)."""
        return number(self.path / "memory.peak") or 0

    def memory_kills(self) -> int:
        """The number of processes that the kernel killed because of ``memory.max``."""
        return numbers(self.path / "memory.events").get("oom_kill", 0)

    def refused_forks(self) -> int:
        """The number of forks refused because of ``pids.max``."""
        return numbers(self.path / "pids.events").get("max", 0)

    def close(self) -> None:
        """Remove the group; it stays if a process in it cannot be killed (asleep in a driver)."""
        end_s = time.monotonic() + _REMOVE_S
        while self.path.exists():
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            if time.monotonic() > end_s:
                return
            time.sleep(0.01)

    def _write(self, name: str, value: str) -> bool:
        with contextlib.suppress(OSError):
            # No O_CREAT: files of a group either exist or cannot be created.
            with os.fdopen(os.open(self.path / name, os.O_WRONLY), "w") as file:
                file.write(value)
            return True
        return False


def _sweep(home: Path) -> None:
    """Remove stale groups, left by agents that were killed."""
    for group in home.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it holds processes, or another process removed it first
            if time.time() - group.stat().st_mtime > _STALE_S:
                group.rmdir()


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group that can limit memory, of version 1 or 2 of control groups."""

    path: Path
    version_1: bool

    def room_bytes(self) -> int:
        """The bytes that the group may still take now; ``sys.maxsize`` without a limit.

        File pages not used recently count as available, since the kernel reclaims them.
        """
        stat = numbers(self.path / "memory.stat")
        if self.version_1:
            # The limit of a parent group that is not visible from here is in the group's own statistics.
            limits = [number(self.path / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit")]
            used, idle = number(self.path / "memory.usage_in_bytes"), "total_inactive_file"  # of child groups too
        else:
            limits = [number(self.path / "memory.max")]
            used, idle = number(self.path / "memory.current"), "inactive_file"
        cap = min((limit for limit in limits if limit is not None), default=sys.maxsize)
        return sys.maxsize if cap >= _NO_LIMIT else max(0, cap - (used or 0) + stat.get(idle, 0))


def memory_groups(proc: Path = Path("/proc")) -> list[MemoryGroup]:
    """This process's group and the groups above it that can limit memory, of both versions."""
    found = []
    for controller, limit in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        own = own_group(proc, controller)
        if not isinstance(own, str):
            found += [MemoryGroup(at, bool(controller)) for at in (own, *own.parents) if (at / limit).exists()]
    return found
