"""A job's output on disk: its beginning and its end, whatever it prints."""

from __future__ import annotations

from pathlib import Path

KEPT_BYTES = 512 * 1024


class BoundedOutput:
    """Writes a job's output to a file: the first and the last ``KEPT_BYTES``, with a line about what is left out."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._tail = bytearray()
        self.total_bytes = 0

    def write(self, data: bytes) -> None:
        room = max(0, KEPT_BYTES - self.total_bytes)
        self.total_bytes += len(data)
        if room:
            self._file.write(data[:room])
        if len(data) > room:
            self._tail += data[room:]
            del self._tail[:-KEPT_BYTES]

    def close(self) -> None:
        left_out = self.total_bytes - KEPT_BYTES - len(self._tail)
        if left_out > 0:
            self._file.write(f"\n[... {left_out} bytes left out ...]\n".encode())
        self._file.write(self._tail)
        self._file.close()
