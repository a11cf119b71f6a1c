"""A control group (v2) for each worker, where this process may make one.

Which place is ours to use, in this order:

1. The parent of our own group, if it was delegated to us and hands its controllers down: the worker's group becomes
   a sibling of ours.  That is so under a user's systemd (``systemd-run --user --scope``).
2. Our own group.  It holds processes, so by the rule of no internal processes it hands down no controller (the
   root of the hierarchy may); a group in it can still be frozen and killed as a whole.

Where systemd runs, a group that it did not delegate is its own to manage, even if we are root.  Nothing is ever
changed but the groups made here.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"[\w.-]+")
_PREFIX = "pipefill-"
_STALE_S = 60.0  # a group that is empty for longer than it takes to start a worker was left by a killed agent
_REMOVE_S = 0.2  # how long a group whose processes are being ended may take to become empty


@dataclass(frozen=True, slots=True)
class CgroupHome:
    """Where a worker's group may be made.

    Attributes:
        path: the parent of the group; None if there is no such place.
        controllers: what the group will have: ``memory``, ``pids``, ``cpu``, ...
        why: why there is no place, or no better one; empty if nothing is missing.
    """

    path: Path | None
    controllers: frozenset[str] = frozenset()
    why: str = ""

    @property
    def binds_memory(self) -> bool:
        return self.path is not None and "memory" in self.controllers

    @property
    def binds_processes(self) -> bool:
        return self.path is not None and "pids" in self.controllers


def find_home(
    proc: Path = Path("/proc"), systemd: bool | None = None, delegated: frozenset[Path] | None = None
) -> CgroupHome:
    """The best place for workers' groups that this process may use.

    Args:
        proc: for tests.
        systemd: whether systemd manages the groups of this machine; None to look.
        delegated: the groups that it delegated, for tests; None to look.
    """
    own = own_group(proc)
    if isinstance(own, str):
        return CgroupHome(None, why=own)
    if systemd is None:
        systemd = Path("/run/systemd/system").is_dir()
    managed = systemd and not _is_delegated(own, delegated)
    if managed:
        return CgroupHome(None, why="systemd manages this group; start with systemd-run --scope -p Delegate=yes")
    if not (own / "cgroup.type").exists():  # the root, which may have processes and hand controllers down
        return _usable(own, "the root group does not hand down")
    parent = own.parent
    if (parent / "cgroup.type").exists() and (not systemd or _is_delegated(parent, delegated)):
        home = _usable(parent, "its parent does not hand down")
        if home.binds_memory:
            return home
    return _usable(own, "a group that holds processes cannot hand down")


def _usable(path: Path, why: str) -> CgroupHome:
    """``path`` as a home, if it can be written to."""
    if not all(os.access(file, os.W_OK) for file in (path, path / "cgroup.procs")):
        return CgroupHome(None, why="the control groups are not writable for this user")
    controllers = frozenset(_read(path / "cgroup.subtree_control").split())
    lacking = [name for name in ("memory", "pids") if name not in controllers]
    return CgroupHome(path, controllers, f"{why} {' and '.join(lacking)}" if lacking else "")


def own_group(proc: Path = Path("/proc"), version_1: str = "") -> Path | str:
    """This process's group, or why there is none.

    Args:
        version_1: in the hierarchy of this controller, of version 1; empty for version 2's only one.
    """
    name = f"cgroup v1 with {version_1}" if version_1 else "cgroup v2"
    mounts = [line.split() for line in _read(proc / "self/mountinfo").splitlines()]
    found = [(Path(m[4]), m[3]) for m in mounts if _is_hierarchy(m[m.index("-") + 1 :], version_1)]
    if not found:
        return f"{name} is not mounted"
    mount, root = found[0]
    fields = [line.split(":", 2) for line in _read(proc / "self/cgroup").splitlines()]
    lines = [path for _, controllers, path in fields if version_1 in controllers.split(",")]
    inside = lines[0] if lines else "/"
    relative = os.path.relpath(inside, root)
    if inside.startswith("/..") or relative.startswith(".."):
        return "this process's control group lies outside of what is mounted here"
    return mount if relative == "." else mount / relative


def _is_hierarchy(mounted: list[str], version_1: str) -> bool:
    """Whether this is it: the type, source and options of a line of mountinfo(5)."""
    if not version_1:
        return mounted[0] == "cgroup2"
    return mounted[0] == "cgroup" and version_1 in mounted[-1].split(",")


def _is_delegated(path: Path, known: frozenset[Path] | None) -> bool:
    """Whether systemd handed this group, or one above it, to somebody else."""
    if known is not None:
        return any(place in known for place in (path, *path.parents))
    for place in (path, *path.parents):
        for name in ("user.delegate", "trusted.delegate"):
            with contextlib.suppress(OSError):
                if os.getxattr(place, name) == b"1":
                    return True
    return False


class Cgroup:
    """One worker's group.

    Args:
        home: a place with a path.
        memory_bytes, processes: limits; kept by the kernel where ``home`` has the controllers.

    Raises:
        OSError: it cannot be made after all.
        ValueError: the name cannot be a folder's.
    """

    def __init__(self, home: CgroupHome, name: str, memory_bytes: int | None, processes: int) -> None:
        if not _NAME.fullmatch(name) or name.startswith("."):
            raise ValueError(f"{name!r} cannot name a control group: expected letters, digits, '.', '_', '-'")
        assert home.path is not None
        self.path = home.path / f"{_PREFIX}{name}"
        _sweep(home.path)
        self.binds_memory = home.binds_memory and memory_bytes is not None
        with contextlib.suppress(FileExistsError):  # left by a run that was killed; its limits are written anew
            self.path.mkdir()
        try:
            if home.binds_memory:
                (self.path / "memory.max").write_text("max" if memory_bytes is None else str(memory_bytes))
                self._write("memory.swap.max", "0")  # else the cap only pushes the worker out to disk
                self._write("memory.oom.group", "1")
            if home.binds_processes:
                (self.path / "pids.max").write_text(str(processes))
            if "cpu" in home.controllers and not self._write("cpu.idle", "1"):
                # A group competes as one with the training's; the idle class counts only within it.
                (self.path / "cpu.weight").write_text("1")
        except OSError:
            self.close()
            raise

    def add(self, pid: int) -> bool:
        return self._write("cgroup.procs", str(pid))

    def processes(self) -> list[int]:
        return [int(pid) for pid in _read(self.path / "cgroup.procs").split() if pid != "0"]

    def kill(self) -> bool:
        """End all processes in it at once, those being forked too; False where the kernel cannot (before 5.14)."""
        return self._write("cgroup.kill", "1")

    def freeze(self, on: bool) -> bool:
        return self._write("cgroup.freeze", "1" if on else "0")

    def held_bytes(self) -> int:
        """What the processes hold that is not a file's: the rest of memory.current is given back when it is needed."""
        stat = self.path / "memory.stat"
        return _entry(stat, "anon") + _entry(stat, "shmem")

    def busy_s(self) -> float | None:
        """The CPU time that was used in it; None where the kernel does not say."""
        return _entry(self.path / "cpu.stat", "usage_usec") / 1e6 if (self.path / "cpu.stat").exists() else None

    def peak_bytes(self) -> int:
        """The most that ``memory.max`` was compared with; 0 where the kernel does not say (before 5.19)."""
        text = _read(self.path / "memory.peak").strip()
        return int(text) if text.isdigit() else 0

    def memory_kills(self) -> int:
        """How often the kernel ended a process because of ``memory.max``."""
        return _entry(self.path / "memory.events", "oom_kill")

    def refused_forks(self) -> int:
        """How often ``pids.max`` was reached."""
        return _entry(self.path / "pids.events", "max")

    def close(self) -> None:
        """Remove it; it stays if a process cannot be ended (asleep in a driver)."""
        end_s = time.monotonic() + _REMOVE_S
        while self.path.exists():
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            if time.monotonic() > end_s:
                return
            time.sleep(0.01)

    def _write(self, name: str, value: str) -> bool:
        try:
            # Not to be created: in a real group a file is there or not.
            fd = os.open(self.path / name, os.O_WRONLY)
        except OSError:
            return False
        try:
            os.write(fd, value.encode())
        except OSError:
            return False
        finally:
            os.close(fd)
        return True


def _sweep(home: Path) -> None:
    """Remove groups that nobody will use any more."""
    for group in home.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it holds processes, or somebody else was quicker
            if time.time() - group.stat().st_mtime > _STALE_S:
                group.rmdir()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _entry(path: Path, name: str) -> int:
    """One number of a file of names and numbers."""
    found = [line.split()[1] for line in _read(path).splitlines() if line.startswith(name + " ")]
    return int(found[0]) if found else 0
