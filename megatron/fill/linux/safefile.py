"""Writing into a folder that a job can write to, where it may have put links; ``untrusted`` reads from such folders."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_MOST_SHOWN = 300  # characters
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_folder(path: Path) -> int:
    """Open a folder whose absolute path contains no link; return its descriptor, which the caller closes.

    OSError if it does not exist, or a part of the path is a link or not a folder.
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
    """Remove the file, link or whole folder at ``path``, if there is one."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it, however deep a job has made it; links in it are not followed.

    OSError if something of it is left.  ``shutil.rmtree`` recurses in Python 3.12: a RecursionError after 1000 levels.
    """
    done = subprocess.run(["rm", "-rf", "--one-file-system", "--", path], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{path} cannot be removed: {done.stderr[:_MOST_SHOWN]}")


def disk_bytes(path: Path) -> int:
    """Return the disk space in bytes that a file or a folder takes, without what cannot be read or is behind links."""
    command = ["du", "--summarize", "--one-file-system", "--block-size=1", "--", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return int(said[0]) if said else 0


def create(path: Path, mode: int = 0o644) -> int:
    """Create an empty file in place of anything at ``path``; return its descriptor, which the caller closes."""
    remove(path)
    # Exclusive: if a job is quick enough to put a link there again, this fails.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a new file in place of anything at ``path``."""
    with os.fdopen(create(path, mode), "w", encoding="utf-8") as file:
        file.write(text)
