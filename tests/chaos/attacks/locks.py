"""Attacks on others' files without writing: locks, leases, notifications, reading."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from megatron.fill.folders import AGENTS, JOBS, LOCKS, OUTPUT, RUN_LOCK
from tests.chaos.attacks.base import Attack, Ground, Refused, beside, try_all
from tests.chaos.attacks.calls import syscall
from tests.chaos.kind import attack

_HELD_S = 3.0
_F_NOTIFY, _DN_MODIFY = 1026, 0x2
_OFD_SETLK = 37
_IN_ALL = 0xFFF


def _run(ground: Ground) -> list[Path]:
    """The run folder's lock and files; the folder itself may be an empty stand-in here."""
    return [ground.run / RUN_LOCK, *ground.others_files()]


def _others(ground: Ground) -> list[Path]:
    """Other jobs' folders, outputs, locks and files."""
    run = ground.run
    parts = [run / part for part in (JOBS, OUTPUT, LOCKS)]
    return [path for path in ground.others_files() if any(map(path.is_relative_to, parts))]


def _store(ground: Ground) -> list[Path]:
    return [ground.folder / f"jobs.db{part}" for part in ("", "-wal", "-shm")]


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def _flock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _posix(fd: int) -> None:
    fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _ofd(fd: int) -> None:
    fcntl.fcntl(fd, _OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))


def _lease(fd: int) -> None:
    """Take a lease: to open the file for writing, others must wait until it is returned."""
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)


def _dnotify(fd: int) -> None:
    fcntl.fcntl(fd, _F_NOTIFY, _DN_MODIFY)


def _hold(where: Callable[[Ground], list[Path]], take: Callable[[int], None], ground: Ground) -> str:
    """Take a lock on each of these, and keep it for some seconds."""
    held: list[int] = []

    def grip(path: Path) -> None:
        held.append(fd := _open(path))
        take(fd)

    def release() -> None:
        time.sleep(_HELD_S)
        for fd in held:
            os.close(fd)

    try:
        return try_all((path.name, partial(grip, path)) for path in where(ground))
    finally:
        beside(release)


def _watch(where: Callable[[Ground], list[Path]], ground: Ground) -> str:
    """Ask for notifications of all changes of a file."""
    fd = syscall("inotify_init1", os.O_CLOEXEC)

    def add(path: Path) -> None:
        if stat.S_ISCHR(path.stat().st_mode):
            raise Refused("a device is in its place")
        syscall("inotify_add_watch", fd, os.fsencode(path), _IN_ALL)

    try:
        return try_all((path.name, partial(add, path)) for path in where(ground))
    finally:
        os.close(fd)


def _read(part: str, ground: Ground) -> str:
    """Read others' files in this part of the run folder."""

    def look(path: Path) -> None:
        with path.open("rb") as file:
            file.read(16)

    paths = [*_run(ground), *_others(ground)]
    return try_all((str(path), partial(look, path)) for path in paths if path.parent.name == part or part in path.parts)


def _list(ground: Ground) -> str:
    """List the names of other jobs and of their files."""

    def names(path: Path) -> None:
        others = set(os.listdir(path)) - {JOBS, ground.directory.name}
        if not others:
            raise FileNotFoundError(f"nothing is to be seen in {path}")

    run = ground.run
    return try_all((path.name, partial(names, path)) for path in (run, run / JOBS, run / OUTPUT, run / AGENTS))


def _borrow(how: Callable[[str, str], None], ground: Ground) -> str:
    """Link or move others' files into the job's own folder."""

    def take(path: Path) -> None:
        own = ground.directory / "borrowed"
        how(str(path), str(own))
        own.unlink()

    return try_all((path.name, partial(take, path)) for path in [*_others(ground), *_store(ground)])


def _append(ground: Ground) -> str:
    def write(path: Path) -> None:
        with path.open("ab") as file:
            file.write(b"x")

    return try_all((path.name, partial(write, path)) for path in _others(ground))


def _change(ground: Ground) -> str:
    """Change mode, owner and times of others' files."""
    ways: list[tuple[str, Callable[[], object]]] = []
    for path in [*_others(ground), *_run(ground)]:
        ways += [
            (f"mode of {path.name}", partial(os.chmod, path, 0o777)),
            (f"owner of {path.name}", partial(os.chown, path, os.getuid(), os.getgid())),
            (f"times of {path.name}", partial(os.utime, path, (0, 0))),
        ]
    return try_all(ways)


def _tables() -> Iterator[Attack]:
    refused = partial(attack, refused=True)
    places = (("run", "the run folder and its files", _run), ("others", "other jobs' files", _others))
    for name, what, where in (*places, ("store", "the job store", _store)):
        yield Attack(refused(f"flock-{name}", f"locks {what} (flock)"), partial(_hold, where, _flock), 1.0)
        yield Attack(refused(f"lock-{name}", f"locks {what} (fcntl)"), partial(_hold, where, _posix), 1.0)
        yield Attack(refused(f"ofd-lock-{name}", f"locks {what} by the open file"), partial(_hold, where, _ofd))
        yield Attack(refused(f"lease-{name}", f"takes leases of {what}"), partial(_hold, where, _lease))
        yield Attack(refused(f"inotify-{name}", f"hears of {what} (inotify)"), partial(_watch, where))
    for name, what, where in places:
        yield Attack(refused(f"dnotify-{name}", f"hears of {what} (F_NOTIFY)"), partial(_hold, where, _dnotify))
    for part, what in (
        (OUTPUT, "outputs of jobs"),
        (JOBS, "results and checkpoints of jobs"),
        (AGENTS, "agents' files"),
    ):
        yield Attack(refused(f"read-{part}", f"reads {what}"), partial(_read, part))
    yield Attack(refused("list-run", "lists the run folder and other jobs"), _list)
    yield Attack(refused("link-others", "hard links to others' files"), partial(_borrow, os.link))
    yield Attack(refused("rename-others", "moves others' files to its own folder"), partial(_borrow, os.rename))
    yield Attack(refused("append-others", "appends to other jobs' files"), _append)
    yield Attack(refused("change-others", "modes, owners and times of others' files"), _change)


ATTACKS = tuple(_tables())
