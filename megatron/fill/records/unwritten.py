"""Records that a rank and its agent could not write, kept in memory until the training ends."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Records of one rank that are in no file."""

    seen: str = ""  # lines of the rank's record, with their own head; empty if all of it is written
    ended: str = ""  # lines of its agent's record, likewise
    cut: bool = False  # True if lines of the rank's record are missing in ``seen`` too
    lost: bool = False  # True if lines of the agent's record are missing in ``ended`` too

    def __bool__(self) -> bool:
        return self != Unwritten()

    def packed(self, most_bytes: int) -> bytes:
        """Return the records compressed for ``unpacked``, leaving some out to fit into ``most_bytes`` (at least 64)."""
        less = (self, replace(self, seen="", cut=True), Unwritten(cut=True, lost=True))
        made = (zlib.compress(json.dumps(asdict(one)).encode(), 1) for one in less)
        return next(data for data in made if len(data) <= most_bytes)

    @classmethod
    def unpacked(cls, data: bytes) -> Unwritten:
        """Return the records from the bytes of ``packed``."""
        return cls(**json.loads(zlib.decompress(data)))


def in_memory(text: str) -> Path:
    """Return the path of a new memory file (memfd) with this text; only this process can open it, until it ends."""
    fd = os.memfd_create("pipefill-unwritten", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(text.encode())
    return Path(f"/proc/self/fd/{fd}")
