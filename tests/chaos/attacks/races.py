"""Attacks on readers of a job's folder, and on its removal: files that change, deep and huge folders."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.chaos.attacks.base import Attack, Ground, beside, try_all
from tests.chaos.kind import attack

_STORM_S = 4.0
_DEEP, _MANY, _LINKS = 3_000, 8_000, 500
_SPARSE = 1 << 40


def _flicker(names: tuple[str, ...], ground: Ground) -> str:
    """Replace a file by a link to another's file and by nothing, in turn: it changes between a look and an open."""
    target = str(next(iter(ground.others_files()), "/etc/shadow"))

    def flick() -> None:
        end_s = time.monotonic() + _STORM_S
        fresh = ground.directory / ".fresh"
        while time.monotonic() < end_s:
            for name in names:
                with suppress(OSError):
                    fresh.write_text("{}", encoding="ascii")
                    os.replace(fresh, ground.directory / name)
                    fresh.symlink_to(target)
                    os.replace(fresh, ground.directory / name)
                    (ground.directory / name).unlink()

    beside(flick)
    return f"{', '.join(names)} change to and fro"


def _hard_links(ground: Ground) -> str:
    """A file with hundreds of names."""
    path = ground.directory / "named"
    path.write_bytes(b"x")
    for number in range(_LINKS):
        os.link(path, ground.directory / f"name-{number}")
    return f"{_LINKS} names of one file"


def _deep(ground: Ground) -> str:
    """Nested folders, deeper than a path may be long."""
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(ground.directory)
        for _ in range(_DEEP):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.fchdir(here)
        os.close(here)
    return f"{_DEEP} folders in one another"


def _huge(ground: Ground) -> str:
    folder = ground.directory / "many"
    folder.mkdir()
    for number in range(_MANY):
        (folder / str(number)).touch()
    return f"{_MANY} files"


def _sparse(ground: Ground) -> str:
    """Files of a tebibyte that take no space, with the names that are read."""
    for name in ("result.json", "profile.json", "plan.json", "sparse"):
        with suppress(OSError), (ground.directory / name).open("wb") as file:
            file.truncate(_SPARSE)
    return "files of a tebibyte"


def _loops(ground: Ground) -> str:
    """Links to the folder itself and to the root: following them never ends."""
    for name, target in (("self", "."), ("up", "../.."), ("all", "/")):
        (ground.directory / name).symlink_to(target)
    return "links that go round"


def _devices(ground: Ground) -> str:
    """A socket, a pipe and a closed folder among the files that are listed and copied."""
    with socket.socket(socket.AF_UNIX) as one:
        here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        os.chdir(ground.directory)
        try:
            one.bind("socket")
        finally:
            os.fchdir(here)
            os.close(here)
    os.mkfifo(ground.directory / "pipe")
    closed = ground.directory / "closed"
    closed.mkdir()
    closed.chmod(0)
    return "a socket, a pipe, a closed folder"


def _beside(ground: Ground) -> str:
    """Replace the job's output and lock, which are next to its folder."""
    run = ground.run
    own = ground.directory.name

    def put(path: Path) -> None:
        fresh = ground.directory / "pipe-for-output"
        os.mkfifo(fresh)
        try:
            os.rename(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)

    places = (run / "output" / f"{own}.log", run / "locks" / own, run / "jobs" / f"{own}.log")
    return try_all((str(path), partial(put, path)) for path in places)


def _set_id(ground: Ground) -> str:
    """A program that would run as the job's user, for any user who starts it."""
    path = ground.directory / "program"
    path.write_bytes(b"#!/bin/sh\n")
    path.chmod(0o6755)
    return "a program with set-user-ID"


def _tables() -> Iterator[Attack]:
    either = partial(attack, either=True)
    for name, files in (
        ("result", ("result.json",)),
        ("checkpoint", ("checkpoint.pt", "checkpoint-previous.pt")),
        ("plan", ("plan.json", "profile.json")),
        ("output", ("output.log", "spec.json")),
    ):
        yield Attack(either(f"race-{name}", f"{files[0]} is a file, a link, nothing"), partial(_flicker, files), 5.0)
    yield Attack(attack("folder-names", "500 names of one file"), _hard_links)
    yield Attack(either("folder-deep", "3,000 folders in one another"), _deep)
    yield Attack(attack("folder-huge", "8,000 files in its folder"), _huge)
    yield Attack(either("folder-sparse", "files of a tebibyte that take no room"), _sparse, 6.0)
    yield Attack(attack("folder-loops", "links to itself and to everything"), _loops)
    yield Attack(attack("folder-odd", "a socket, a pipe and a closed folder"), _devices)
    yield Attack(attack("folder-beside", "a pipe in the place of its output and of its lock", refused=True), _beside)
    yield Attack(attack("folder-program", "a program with set-user-ID"), _set_id)


ATTACKS = tuple(_tables())
