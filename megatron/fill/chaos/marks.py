"""Marks: what a task of a chaos run notes just before it misbehaves, so that a fault counts only if it happened.

One file of JSON lines per job, outside of the run folder, whose disk may be full.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


class Event(StrEnum):
    """What a task notes."""

    READY = "ready"  # it runs well, and may be hit from outside
    FAULT = "fault"  # the next thing that it does is its fault


@dataclass(frozen=True, slots=True)
class Mark:
    """One line.

    Attributes:
        at_ns: CLOCK_MONOTONIC.
        pid: the worker's.
    """

    event: Event
    at_ns: int
    pid: int


def mark(path: Path, event: Event) -> None:
    """Note that this happens now."""
    line = json.dumps(asdict(Mark(event, time.monotonic_ns(), os.getpid()))) + "\n"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def read(path: Path, event: Event) -> list[Mark]:
    """All marks of one sort, oldest first; none where there is no file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    marks = [Mark(**json.loads(line)) for line in lines]
    return [Mark(Event(one.event), one.at_ns, one.pid) for one in marks if one.event == event]
