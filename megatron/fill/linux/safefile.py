"""Writing into a folder that a job may write to: it may have put a link there.  ``untrusted`` reads from it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def remove(path: Path) -> None:
    """Remove whatever has this name, a folder with all that is in it; it need not be there.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        shutil.rmtree(path)


def create(path: Path, mode: int = 0o644) -> int:
    """A descriptor of a new, empty file in place of whatever has this name; the caller closes it.

    Raises:
        OSError: it cannot be made.
    """
    remove(path)
    # Exclusive: whoever is quick enough to put a link there again makes this fail instead.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a new file in place of whatever has this name."""
    with os.fdopen(create(path, mode), "w", encoding="utf-8") as file:
        file.write(text)
