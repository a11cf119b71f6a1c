"""A small disk of a chaos run's own, to be filled up: a tmpfs that no other process of the machine sees."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

_MIB = 1 << 20
_DISK_BYTES = 192 * _MIB
_FILLER = "filler"


class SmallDisk:
    """A folder on a file system of its own, where that can be had.

    It is mounted in a mount namespace that this process and those it starts live in, so that nothing stays mounted
    when they are gone, however they end.  Make it before any thread.

    Attributes:
        folder: where it is.
        why_not: why it is an ordinary folder, which cannot be filled up; ``""`` if it is not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.why_not = _mount(folder)

    def fill(self) -> bool:
        """Leave no byte free; whether that worked."""
        with contextlib.suppress(OSError), (self.folder / _FILLER).open("ab", buffering=0) as file:
            block = bytes(_MIB)
            while True:
                file.write(block)
        return os.statvfs(self.folder).f_bavail == 0

    def free(self) -> None:
        """Give the space back."""
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
