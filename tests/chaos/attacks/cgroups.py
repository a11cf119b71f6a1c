"""Attacks on the training through the cgroup file system."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

from tests.chaos.attacks.base import Ground, NoTargetError, Refused, own_session

_PREFIX = "pipefill-chaos-"
_FROZEN_S = 5.0


def roots() -> list[tuple[Path, int]]:
    """The mount points of cgroups that can freeze or kill, each with its version."""
    found = []
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, folder, kind, options = line.split()[:4]
        if kind == "cgroup2":
            found.append((Path(folder), 2))
        elif kind == "cgroup" and "freezer" in options.split(","):
            found.append((Path(folder), 1))
    return found


def _tag(folder: Path) -> str:
    """A prefix that only names of cgroups of this chaos run have."""
    return f"{_PREFIX}{crc32(os.fsencode(folder)):08x}-"


def _each(ground: Ground) -> Iterator[tuple[Path, int]]:
    """Yield new cgroups, one in each tree that allows it: those visible here, or else those known outside."""
    why: Exception = NoTargetError("no cgroup file system is in sight, nor known outside")
    made = False
    for root, version in roots() or [(Path(path), version) for path, version in ground.targets.cgroups]:
        try:
            folder = root / f"{_tag(ground.folder)}{os.getpid()}"
            folder.mkdir()
        except OSError as error:
            why = error
            continue
        made = True
        yield folder, version
    if not made:
        raise why


def _move(folder: Path, pids: list[int]) -> None:
    for pid in pids:
        (folder / "cgroup.procs").write_text(str(pid), encoding="ascii")


def kill(ground: Ground) -> str:
    """Move the ranks into a cgroup and kill it."""
    pids = ground.ranks()
    for folder, version in _each(ground):
        if version == 2:
            _move(folder, pids)
            (folder / "cgroup.kill").write_text("1", encoding="ascii")
            return f"the ranks {pids} were killed"
    raise Refused("no cgroup can be killed here")


def freeze(ground: Ground) -> str:
    """Move the ranks into a cgroup and freeze it for some seconds."""
    pids = ground.ranks()
    for folder, version in _each(ground):
        _move(folder, pids)
        if os.fork() == 0:
            try:
                own_session()
                _set(folder, version, frozen=True)
                time.sleep(_FROZEN_S)
                _set(folder, version, frozen=False)
            finally:
                os._exit(0)
        return f"the ranks {pids} were frozen"
    return ""


def freeze_self(ground: Ground) -> str:
    """Freeze a cgroup of this process, which then ignores even SIGKILL."""
    for folder, version in _each(ground):
        _move(folder, [os.getpid()])
        _set(folder, version, frozen=True)
        return "it was frozen"
    return ""


def _set(folder: Path, version: int, *, frozen: bool) -> None:
    if version == 2:
        (folder / "cgroup.freeze").write_text(str(int(frozen)), encoding="ascii")
    else:
        (folder / "freezer.state").write_text("FROZEN" if frozen else "THAWED", encoding="ascii")


def sweep(run: Path) -> None:
    """Thaw and remove the cgroups that such attacks left; called by the driver.

    Args:
        run: folder of the chaos run.
    """
    for root, version in roots():
        for folder in root.glob(_tag(run) + "*"):
            with contextlib.suppress(OSError):
                _set(folder, version, frozen=False)
            with contextlib.suppress(OSError):
                _move(root, [int(pid) for pid in (folder / "cgroup.procs").read_text(encoding="ascii").split()])
            with contextlib.suppress(OSError):
                folder.rmdir()
