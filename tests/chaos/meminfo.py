"""Free memory of the machine as the processes of a chaos run see it: a file in place of /proc/meminfo.

So the training can seem to grow into the margin without taking a byte from any other program.  The file is mounted in
the mount namespace that the run's small disk has created (``disk.SmallDisk``).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_AVAILABLE = re.compile(r"(MemAvailable:\s*)(\d+)( kB)")


class FreeMemory:
    """A stand-in for /proc/meminfo.

    Args:
        folder: for the file.

    Attributes:
        path: path of the file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "meminfo"
        self._true = _MEMINFO.read_text(encoding="ascii")
        self.path.write_text(self._true, encoding="ascii")
        self._mounted = False

    def mount(self) -> bool:
        """Mount it over the kernel's, for all programs that open that from now on; return True on success."""
        if not self._mounted:
            done = subprocess.run(["mount", "--bind", str(self.path), str(_MEMINFO)], capture_output=True, check=False)
            self._mounted = done.returncode == 0
        return self._mounted

    def show(self, available_bytes: int) -> None:
        """Show ``available_bytes`` of memory as available."""
        kib = available_bytes // 1024
        self._write(_AVAILABLE.sub(lambda match: f"{match[1]}{kib:>{len(match[2])}}{match[3]}", self._true))

    def restore(self) -> None:
        """Show the memory that was available at the beginning."""
        self._write(self._true)

    def _write(self, text: str) -> None:
        with self.path.open("r+", encoding="ascii") as file:  # in place: it is open
            file.write(text)
