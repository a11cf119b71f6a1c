"""Writing into a folder that a job may write to: it may have put a link there.  ``untrusted`` reads from it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_folder(path: Path) -> int:
    """A descriptor of a folder that is reached without any link; the caller closes it.

    Raises:
        OSError: it is not there, or something on the way is a link or no folder.
    """
    if not path.is_absolute() or ".." in path.parts:
        raise OSError(f"{path} is no absolute path of folders")
    fd = os.open("/", _FOLDER)
    for part in path.parts[1:]:
        above = fd
        try:
            fd = os.open(part, _FOLDER, dir_fd=above)
        finally:
            os.close(above)
    return fd


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
