"""Marks: notes that a task of a chaos run writes just before it misbehaves, so that a fault counts only if it happened.

There is one file of JSON lines per job, outside of the run folder, whose disk may be full.  Every user may write it,
since a job may run as another user.  Its content is the job's own claim: invalid lines are skipped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

_MOST_BYTES = 4 << 20


class Note(StrEnum):
    """The events that a task notes."""

    READY = "ready"  # it runs well, and may be hit from outside
    FAULT = "fault"  # the next thing that it does is its fault
    HELD = "held"  # what it tried was refused
    THROUGH = "through"  # what it tried went through
    MISSED = "missed"  # there was nothing to try it on


@dataclass(frozen=True, slots=True)
class Mark:
    """A line of the file.

    Attributes:
        at_ns: time in CLOCK_MONOTONIC.
        pid: the worker's pid as it sees it, which is another one outside of its process namespace.
        folder: inode of the worker's working folder, by which it is found from outside; 0 if unknown.
        detail: the attempt that was refused, went through, or had no target.
    """

    event: Note
    at_ns: int
    pid: int
    folder: int = 0
    detail: str = ""


def mark(path: Path, event: Note, detail: str = "") -> None:
    """Note an event that happens now."""
    noted = Mark(event, time.monotonic_ns(), os.getpid(), os.stat(".").st_ino, detail[:500])
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(fd, (json.dumps(asdict(noted)) + "\n").encode())
    finally:
        os.close(fd)


def prepare(path: Path) -> None:
    """Create the file, empty and writable for everybody."""
    path.touch()
    path.chmod(0o666)


def read(path: Path, event: Note) -> list[Mark]:
    """All marks of one event, oldest first; empty if there is no file."""
    return [one for one in _all(path) if one.event is event]


def _all(path: Path) -> Iterator[Mark]:
    try:
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            found = Mark(**json.loads(line))
            yield Mark(Note(found.event), int(found.at_ns), int(found.pid), int(found.folder), str(found.detail))
        except (ValueError, TypeError, RecursionError):
            continue
