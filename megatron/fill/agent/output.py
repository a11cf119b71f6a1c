"""A job's output on disk, bounded: its beginning and its end."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path

from megatron.fill.agent.ending import Ending, How
from megatron.fill.linux import safefile
from megatron.fill.status import Cause

KEPT_BYTES = 512 * 1024


class BoundedOutput:
    """Writes a job's output to a file: the first and the last ``KEPT_BYTES``, with a line on the bytes left out.

    It is also a Watcher: a job that prints more than ``most_bytes`` is ended.
    """

    def __init__(self, path: Path, most_bytes: float = inf) -> None:
        self.most_bytes = most_bytes
        self._file = os.fdopen(safefile.create(path), "wb", buffering=0)
        self._tail = bytearray()
        self._unwritten_bytes = 0
        self.total_bytes = 0

    @property
    def full(self) -> bool:
        """True if no more output is to be read; a job that prints more then blocks until it is ended."""
        return self.total_bytes > self.most_bytes

    def look(self) -> Ending | None:
        if not self.full:
            return None
        return Ending(How.FAIL, Cause.OUTPUT, f"{self.most_bytes / 2**20:g}")

    def write(self, data: bytes) -> None:
        room = max(0, KEPT_BYTES - self.total_bytes)
        self.total_bytes += len(data)
        if room:
            self._put(data[:room])
        if len(data) > room:
            self._tail += data[room:]
            del self._tail[:-KEPT_BYTES]

    def close(self) -> None:
        left_out = self.total_bytes - KEPT_BYTES - len(self._tail)
        if left_out > 0:
            self._put(f"\n[... {left_out} bytes left out ...]\n".encode())
        self._put(bytes(self._tail))
        if self._unwritten_bytes:
            self._put(f"\n[{self._unwritten_bytes} bytes could not be written]\n".encode())
        self._file.close()

    def _put(self, data: bytes) -> None:
        """Write as much as possible: a full disk loses output, and does no other harm."""
        try:
            written = self._file.write(data) or 0
        except OSError:
            written = 0
        self._unwritten_bytes += len(data) - written
