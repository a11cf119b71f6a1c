"""Files in a folder that a job may write to: it may have put a link, a pipe or a flood there."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

MOST_BYTES = 32 << 20


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a plain file.

    Raises:
        OSError: it cannot be read, or is no plain file (links are not followed).
        ValueError: it is larger than ``most_bytes``, or is not UTF-8.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is no plain file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"{path} is larger than {most_bytes} bytes")
    return data.decode("utf-8")


def create(path: Path, mode: int = 0o644) -> int:
    """A descriptor of a new, empty file in place of whatever has this name; the caller closes it.

    Raises:
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    # Exclusive: whoever is quick enough to put a link there again makes this fail instead.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a new file in place of whatever has this name."""
    with os.fdopen(create(path, mode), "w", encoding="utf-8") as file:
        file.write(text)
