"""A small disk of a chaos run's own, which can be filled: a tmpfs that no other process of the machine sees."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

_MIB = 1 << 20
_DISK_BYTES = 192 * _MIB
_FILLER = "filler"


class SmallDisk:
    """A folder on a file system of its own, where that is possible.

    It is mounted in a mount namespace that only this process and its descendants live in, so nothing stays mounted once
    they have ended, however they end.  Create it before any thread.

    Attributes:
        folder: mount point.
        why_not: reason why it is an ordinary folder, which cannot be filled; ``""`` if it is not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.why_not = _mount(folder)

    def fill(self) -> bool:
        """Fill the disk to the last byte; return True if it is full."""
        with contextlib.suppress(OSError), (self.folder / _FILLER).open("ab", buffering=0) as file:
            block = bytes(_MIB)
            while True:
                file.write(block)
        return os.statvfs(self.folder).f_bavail == 0

    def free(self) -> None:
        """Free the space again."""
        (self.folder / _FILLER).unlink(missing_ok=True)


def _mount(folder: Path) -> str:
    if os.geteuid() != 0:
        return "only root can mount a small disk"
    try:
        os.unshare(os.CLONE_NEWNS)
        for arguments in (
            ["--make-rprivate", "/"],
            ["-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "pipefill-chaos", str(folder)],
        ):
            subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        return f"no small disk can be mounted: {' '.join(error.stderr.split())}"
    except OSError as error:
        return f"no small disk can be mounted: {error.strerror}"
    return ""
