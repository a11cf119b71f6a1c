"""Files that are written line by line, and read up to a line that was cut off."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from megatron.fill.errors import FillError

RECORD_VERSION = 5
_MODE = 0o644


class NothingRecorded(FillError):
    """A record has no complete line: its writer was killed right away, or its machine went down."""


def line(content: Mapping[str, Any]) -> bytes:
    """Return one line of a record; values that JSON cannot represent are written as text."""
    return json.dumps(content, separators=(",", ":"), default=str).encode() + b"\n"


def head(kind: str, **more: Any) -> bytes:
    """Return the first line of a record."""
    return line({"version": RECORD_VERSION, "kind": kind, **more})


def append(path: Path, data: bytes) -> None:
    """Append complete lines to a file, or nothing if that raises OSError, so that later lines stay readable."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        before = os.fstat(fd).st_size
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, before)
            raise
    finally:
        os.close(fd)


def note(folder: Path, name: str, rank: int) -> bool:
    """Note an event in a segment's folder; True if this rank is the first to note it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    except FileExistsError:
        return False
    except OSError:  # it cannot be noted: better reported by two ranks than by none
        return True
    with suppress(OSError):  # a full disk has room for a name
        os.write(fd, f"rank {rank}\n".encode())
    os.close(fd)
    return True


def read_lines(path: Path, kind: str, but: str = "") -> Iterator[dict[str, Any]]:
    """Yield the head of a record, without kind and version, and its lines, without a last one that was cut off.

    Lines that begin with the field ``but`` are skipped.

    Raises:
        NothingRecorded: the file has no complete line.
        FillError: the file cannot be read, is not a record of this kind and version, or is damaged.
    """
    skipped = f'{{"{but}":'.encode() if but else None
    try:
        with path.open("rb") as file:
            first = _parse(path, 1, file.readline())
            check(path, kind, first)
            yield first
            for number, text in enumerate(file, 2):
                if skipped is None or not text.startswith(skipped):
                    with suppress(NothingRecorded):  # the last one
                        yield _parse(path, number, text)
    except OSError as error:
        raise FillError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(path: Path, number: int, text: bytes) -> dict[str, Any]:
    """Parse one line of a record; raise NothingRecorded if it was cut off."""
    try:
        content = from_json(text)  # a third of the time of json.loads
    except ValueError as error:
        if not text.endswith(b"\n"):
            raise NothingRecorded(f"{path}: line {number} was cut off") from error
        raise FillError(f"{path}: line {number} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise FillError(f"{path}: line {number} is {str(content)[:40]!r}; expected an object")
    return content


@contextmanager
def content_of(path: Path) -> Iterator[None]:
    """Raise FillError for an error in what is made of the values of a record: it is damaged."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FillError(f"{path}: is damaged: {type(error).__name__}: {error}") from error


def check(path: Path, kind: str, content: dict[str, Any]) -> None:
    """Take kind and version off the head of a record; FillError if they are others."""
    if content.pop("kind", None) != kind:
        raise FillError(f"{path}: is not the record of a PipeFill {kind}")
    if (version := content.pop("version", None)) != RECORD_VERSION:
        raise FillError(f"{path}: has version {version!r}; this PipeFill reads {RECORD_VERSION}")
