"""The files that a job sees: all read-only except its own folder; no sockets, devices or temporary files of others.

The view is created in the job's own mount namespace, before any code of the job runs.  Paths are the same as outside.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import megatron.fill
from megatron.fill.folders import PARTS, RUN_LOCK
from megatron.fill.sandbox import mounts
from megatron.fill.sandbox.config import Sandbox

_NODES = ("null", "zero", "full", "random", "urandom")
_ZERO, _ENDLESS_BYTES = "/dev/zero", 1 << 62
# A process that can open a socket's path can connect to it, read-only or not.
_HIDDEN = ("/dev", "/run", "/tmp", "/sys/fs/cgroup")
_SEEN_ALL_THE_SAME = ("/run/systemd/resolve", "/run/current-system", "/run/opengl-driver", "/run/nvidia-persistenced")
_CLOSED_IN_PROC = ("sys", "sysrq-trigger", "irq", "bus", "acpi", "scsi")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
_LIMITED = mounts.NO_SETUID | mounts.NO_DEVICES
_SCRATCH = "/dev"  # place where the files in memory are created before they are moved; it is hidden anyway


def build(sandbox: Sandbox) -> None:
    """Turn this mount namespace into the job's view; after an OSError, the namespace must not be used."""
    mounts.make_private()
    hidden = _hidden(sandbox)
    wanted = _wanted(sandbox, hidden)
    places = {path: mounts.take(path) for path in wanted}
    for path, writable in wanted.items():
        mounts.restrict(places[path], _LIMITED | (0 if writable else mounts.READ_ONLY))
    zeros = not sandbox.devices and "uncounted memory" not in sandbox.without
    devices = {path: mounts.take(path) for path in nodes(sandbox) if path != _ZERO or not zeros}
    shared = mounts.take("/dev/shm") if sandbox.host_memory_files else None
    mounts.restrict("/", mounts.READ_ONLY | _LIMITED)
    temporary, shared = _memory_files(sandbox, shared)
    covered = _lay_out(hidden, places, temporary)
    for path, fd in devices.items():
        mounts.put(fd, path)
    if zeros:
        _put_zeros()
    mounts.put(shared, "/dev/shm")
    for name, target in _LINKS.items():
        os.symlink(target, f"/dev/{name}")
    for path in covered:
        mounts.restrict(path, mounts.READ_ONLY, recursive=False)
    _mask((*sandbox.masked, *(f"{run}/{RUN_LOCK}" for run in sandbox.runs)))


def _lay_out(hidden: list[str], places: dict[str, int], temporary: int) -> list[str]:
    """Cover the hidden folders and mount the places, clones by path, from the root down; return the covered folders.

    Thanks to this order, a hidden folder below a place stays hidden, and a place below a hidden folder is visible.
    """
    covered = []
    steps = [*((path, None) for path in hidden), *places.items()]
    for path, place in sorted(steps, key=lambda step: step[0].count("/")):  # for equal paths the cover comes first
        if place is not None:
            mounts.put(place, path)
        elif path == os.path.realpath("/tmp"):
            mounts.put(temporary, path)
        elif os.path.isdir(path):  # not hidden already by a folder above it
            mounts.new_memory(path, "mode=755,size=1m,nr_inodes=4096")
            covered.append(path)
    return covered


def see_own_processes() -> int:
    """Mount a ``/proc`` of this process namespace, read-only, since writing there changes settings of processes.

    A kernel refuses it in a container that hides parts of its ``/proc``.

    Returns:
        Descriptor of a writable view of it, except for settings of the whole machine.
    """
    mounts.mount("proc", "/proc", "proc", _LIMITED | mounts.NO_PROGRAMS)
    for name in _CLOSED_IN_PROC:
        if os.path.exists(f"/proc/{name}"):
            fd = mounts.take(f"/proc/{name}")
            mounts.restrict(fd, mounts.READ_ONLY)
            mounts.put(fd, f"/proc/{name}")
    writable = mounts.take("/proc")
    mounts.restrict("/proc", mounts.READ_ONLY)
    return writable


def _put_zeros() -> None:
    """Put a sparse file in the place of ``/dev/zero``, whose pages count for no process if a job maps them shared."""
    fd = os.open(_ZERO, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    os.ftruncate(fd, _ENDLESS_BYTES)
    os.close(fd)


def _mask(files: tuple[str, ...]) -> None:
    """Put a device that cannot be opened in the place of each of these files that is visible."""
    for path in filter(os.path.exists, map(os.path.realpath, files)):
        fd = mounts.take("/dev/null")
        mounts.restrict(fd, mounts.READ_ONLY | _LIMITED)
        mounts.put(fd, path)


def _hidden(sandbox: Sandbox) -> list[str]:
    """The folders that are hidden, with links resolved."""
    wanted = (*_HIDDEN, *_closed_folders(sandbox), *_closed_runs(sandbox))
    return sorted({os.path.realpath(path) for path in wanted if os.path.isdir(path)})


def _closed_runs(sandbox: Sandbox) -> list[str]:
    """The run folders; of one that the job needs itself (as a module path, say), only PipeFill's parts."""
    if "run folder" in sandbox.without:
        return []
    needed = set(map(os.path.realpath, _needed(sandbox)))
    runs = {os.path.realpath(run) for run in sandbox.runs}
    return [*(runs - needed), *(f"{run}/{part}" for run in runs & needed for part in PARTS)]


def _wanted(sandbox: Sandbox, hidden: list[str]) -> dict[str, bool]:
    """The paths to mount; the value is True if the job may write there."""
    wanted: dict[str, bool] = {}
    for path in (*_needed(sandbox), *_SEEN_ALL_THE_SAME):
        real = os.path.realpath(path)
        # A path outside of hidden folders is visible anyway, and one above a hidden folder would make it visible again.
        if (
            os.path.exists(real)
            and any(real.startswith(folder.rstrip("/") + "/") for folder in hidden)
            and _open_to(real, sandbox)
        ):
            wanted.setdefault(real, False)
    return wanted | {os.path.realpath(path): True for path in sandbox.writable}


def _open_to(path: str, sandbox: Sandbox) -> bool:
    return sandbox.user is None or not os.path.isdir(path) or may_enter(Path(path), sandbox.user, sandbox.group)


def _needed(sandbox: Sandbox) -> list[str]:
    """The folders of this interpreter and its modules, and the paths that the job is given besides its folder."""
    ours = [str(Path(place).parents[1]) for place in megatron.fill.__path__]
    programs = [sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(os.path.isabs, sys.path), *ours]
    return [*programs, *(bind.path for bind in sandbox.binds)]


def _closed_folders(sandbox: Sandbox) -> list[str]:
    """The folders that the job's user may not enter: they are hidden, and needed paths below are mounted again."""
    if sandbox.user is None:
        return []
    found = set()
    for path in (*_needed(sandbox), *sandbox.writable):
        place = Path(os.path.realpath(path))
        # A needed folder may be closed itself, while needed paths below it are not.
        for folder in [*reversed(place.parents), *([place] if place.is_dir() else [])]:
            if not may_enter(folder, sandbox.user, sandbox.group):
                found.add(str(folder))
                break
    return list(found)


def may_enter(path: Path, user: int | None, group: int | None) -> bool:
    """True if this user may search a folder, or run a program, by its mode."""
    at = path.stat()
    bit = stat.S_IXUSR if at.st_uid == user else stat.S_IXGRP if at.st_gid == group else stat.S_IXOTH
    return bool(at.st_mode & bit)


def nodes(sandbox: Sandbox) -> list[str]:
    """The devices that a job may use: the harmless ones, and those of its sandbox."""
    paths = [*(f"/dev/{name}" for name in _NODES), *sandbox.devices]
    return [path for path in paths if os.path.exists(path)]


def _memory_files(sandbox: Sandbox, shared: int | None) -> tuple[int, int]:
    """The mounts for ``/tmp`` and ``/dev/shm``: of one file system in memory, so that they share one limit, unless
    ``shared`` is a clone of the machine's ``/dev/shm``."""
    mounts.new_memory(_SCRATCH, f"mode=755,size={sandbox.memory_files_bytes},nr_inodes=65536")
    for name in ("tmp", "shm"):
        os.mkdir(f"{_SCRATCH}/{name}")
        os.chmod(f"{_SCRATCH}/{name}", 0o1777)
    temporary = mounts.take(f"{_SCRATCH}/tmp")
    shared = mounts.take(f"{_SCRATCH}/shm") if shared is None else shared
    mounts.detach(_SCRATCH)
    return temporary, shared
