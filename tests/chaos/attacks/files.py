"""Attacks on files: on those that agents read in a job's folder, and on those of others."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.attacks.base import Attack, Ground, beside, own_session, try_all
from tests.chaos.kind import attack, fatal

_READ = (
    "plan.json",
    "result.json",
    "profile.json",
    "checkpoint.pt",
    "checkpoint-previous.pt",
    "output.log",
    "spec.json",
)
_LASTS_S = 7.0  # an agent looks at a plan every five seconds
_HELD_S = 4.0
_GIB = 1 << 30
_BOMB = "bomb-went-off"
_MARK = b"PIPEFILL-SHA256:"


def _replace(path: Path, how: str) -> None:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    with suppress(OSError):
        match how:
            case "fifo":
                os.mkfifo(path)
            case "zero":
                path.symlink_to("/dev/zero")
            case "loop":
                path.symlink_to(path.name)
            case "folder":
                (path / "inner").mkdir(parents=True)
            case "sparse":
                with path.open("wb") as file:
                    file.truncate(4 * _GIB)


def _one(name: str, how: str, ground: Ground) -> str:
    _replace(ground.directory / name, how)
    return ""


def _all(how: str, ground: Ground) -> str:
    for name in _READ:
        _replace(ground.directory / name, how)
    return ""


def _write(name: str, text: str, ground: Ground) -> str:
    (ground.directory / name).write_text(text, encoding="utf-8")
    return ""


def _folder_link(ground: Ground) -> str:
    """Replace the job's folder by a link to another folder of the run."""
    own, aside = ground.directory, ground.directory.with_name(f".{ground.directory.name}")

    def swap() -> None:
        os.rename(own, aside)
        own.symlink_to(own.parents[1] / "records")

    return try_all([("the folder is a link", swap)])


def _write_outside(ground: Ground) -> str:
    """Create files where the job may not: run folder, records, store, other jobs' folders."""
    run = ground.directory.parents[1]
    places = [run, run / "agents", run / "records", run / "control", run / "jobs", ground.folder]
    places += [path for path in (run / "jobs").glob("*") if path != ground.directory][:3]

    def write(place: Path) -> None:
        path = place / "not-the-job's"
        path.touch()
        path.unlink()

    return try_all((str(place.relative_to(ground.folder)), partial(write, place)) for place in places)


def _delete_run(ground: Ground) -> str:
    """Remove the run folder's own files."""
    run = ground.directory.parents[1]
    files = [*(run / "agents").glob("*"), *(run / "records").glob("*/*"), *ground.others_files()]
    return try_all((path.name, path.unlink) for path in files)


def _announcement(how: str, ground: Ground) -> str:
    """Damage the files through which an operator finds the control pages."""
    run = ground.directory.parents[1]
    told = [path for path in ground.others_files() if path.parents[1].name == "control"]
    files = list((run / "control").glob("*/*.json")) or told

    def spoil(path: Path) -> None:
        path.unlink()
        path.touch() if how == "empty" else os.mkfifo(path)

    return try_all((path.name, partial(spoil, path)) for path in files)


def _store_lock(ground: Ground) -> str:
    """Lock the job store's files: SQLite's writers wait for it, and read access is enough to lock."""
    held = []

    def take(path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        held.append(fd)
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def release() -> None:
        time.sleep(_HELD_S)
        for fd in held:
            os.close(fd)

    files = [ground.folder / f"jobs.db{part}" for part in ("", "-shm", "-wal")]
    try:
        return try_all((path.name, partial(take, path)) for path in files)
    finally:
        beside(release)


def _store_write(ground: Ground) -> str:
    """Open the job store as a database, and write to it."""

    def write() -> None:
        path = ground.folder / "jobs.db"
        try:
            with sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=1.0) as connection:
                connection.execute("CREATE TABLE not_the_jobs (x)")
                connection.execute("DROP TABLE not_the_jobs")
        except sqlite3.Error as error:
            raise OSError(str(error)) from error

    return try_all([("a table", write)])


def _store_read(ground: Ground) -> str:
    """Read the job store, which has the data of others."""

    def read(path: Path) -> None:
        with path.open("rb") as file:
            file.read(16)

    return try_all((path.name, partial(read, path)) for path in [ground.folder / "jobs.db"])


class _Bomb:
    """An object that calls ``os.mkdir`` when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def _pickle_bomb(ground: Ground) -> str:
    """Write a checkpoint with a correct checksum that would run code when loaded, and die, so that it is loaded."""
    bomb = ground.directory / _BOMB
    if bomb.exists():
        return "the checkpoint ran code"
    data = pickle.dumps({"done": 1, "x": _Bomb(str(bomb))})
    for name in ("checkpoint.pt", "checkpoint-previous.pt"):
        (ground.directory / name).write_bytes(data + _MARK + hashlib.sha256(data).digest())
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def _die_with(how: str, ground: Ground) -> str:
    for name in ("checkpoint.pt", "checkpoint-previous.pt"):
        _replace(ground.directory / name, how)
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def _lock_folder(ground: Ground) -> str:
    """Leave a process that keeps the job's folder locked, and die: the next attempt finds the folder in use."""
    if os.fork() == 0:
        try:
            own_session()
            fd = os.open(ground.directory, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(60.0)
        finally:
            os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def _no_folder(ground: Ground) -> str:
    """Make its own folder unreadable."""
    os.chmod(ground.directory, 0)
    return ""


_SHAPES = (
    '{"version": 1, "profiles": 5}',
    "[]",
    '[{"nodes": null}]',
    '[[1, 2], "x"]',
    '{"nodes": [{"duration_ns": "x"}]}',
)


def _profile_shape(ground: Ground) -> str:
    """Write a profile that is JSON of a wrong shape; the agent keeps profiles in the store."""
    text = _SHAPES[os.getpid() % len(_SHAPES)]
    return _write("profile.json", text, ground)


def _tables() -> Iterator[Attack]:
    refused = partial(attack, refused=True)
    either = partial(attack, either=True)
    deep = "[" * 200_000
    yield Attack(attack("plan-fifo", "plan.json is a pipe"), partial(_one, "plan.json", "fifo"), _LASTS_S)
    yield Attack(attack("plan-zero", "plan.json is a link to /dev/zero"), partial(_one, "plan.json", "zero"), _LASTS_S)
    yield Attack(attack("plan-deep", "plan.json has 200,000 brackets"), partial(_write, "plan.json", deep), _LASTS_S)
    yield Attack(attack("profile-shape", "a profile of a wrong shape"), _profile_shape, 2.0)
    yield Attack(attack("profile-deep", "a profile of 200,000 brackets"), partial(_write, "profile.json", deep), 2.0)
    yield Attack(attack("result-deep", "a result of 200,000 brackets"), partial(_write, "result.json", deep))
    yield Attack(either("files-fifo", "all that is read in its folder is a pipe"), partial(_all, "fifo"), _LASTS_S)
    yield Attack(
        either("files-zero", "all that is read in its folder is a link to /dev/zero"), partial(_all, "zero"), _LASTS_S
    )
    yield Attack(
        either("files-loop", "all that is read in its folder is a link to itself"), partial(_all, "loop"), _LASTS_S
    )
    yield Attack(
        either("files-folder", "all that is read in its folder is a folder"), partial(_all, "folder"), _LASTS_S
    )
    yield Attack(refused("folder-link", "its folder is replaced by a link"), _folder_link)
    yield Attack(either("folder-closed", "its folder is closed to everybody"), _no_folder)
    yield Attack(either("folder-lock", "its folder is locked by a process that stays; it dies"), _lock_folder)
    yield Attack(refused("write-outside", "writes to run folder, records, others' folders"), _write_outside)
    yield Attack(refused("delete-run", "deletes the run folder's own files"), _delete_run)
    yield Attack(
        refused("announcement-empty", "empties where the control pages are found"), partial(_announcement, "empty")
    )
    yield Attack(refused("announcement-fifo", "the same, with a pipe"), partial(_announcement, "fifo"))
    yield Attack(refused("store-lock-inside", "locks the job store's files from within a job"), _store_lock, _HELD_S)
    yield Attack(refused("store-write", "writes to the job store from within a job"), _store_write)
    yield Attack(refused("store-read", "reads the job store from within a job"), _store_read)
    yield Attack(
        fatal("checkpoint-bomb", "a checkpoint that runs code when it is loaded", "no checkpoint can be loaded"),
        _pickle_bomb,
    )
    yield Attack(
        fatal("checkpoint-sparse", "a checkpoint of 4 GiB of zeros; it dies", "no checkpoint|its cap"),
        partial(_die_with, "sparse"),
    )
    yield Attack(fatal("checkpoint-fifo", "a checkpoint that is a pipe; it dies"), partial(_die_with, "fifo"))
    yield Attack(
        fatal("checkpoint-zero", "a checkpoint that is a link to /dev/zero; it dies"), partial(_die_with, "zero")
    )


ATTACKS = tuple(_tables())
