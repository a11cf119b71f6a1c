"""What a rank and its agent could not write down, on a disk that stayed full say: kept in memory to the training's end,
and read from there.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Unwritten:
    """What is in no file of one rank's.

    Attributes:
        seen: lines of the rank's record, with a head of their own; empty if all of it is written.
        ended: the same of its agent's record.
        cut: more lines of the rank's were lost than are in ``seen``.
        lost: the agent could not write, and has not left it here either.
    """

    seen: str = ""
    ended: str = ""
    cut: bool = False
    lost: bool = False

    def __bool__(self) -> bool:
        return self != Unwritten()

    def packed(self, most_bytes: int) -> bytes:
        """For ``unpacked``, and no longer than this (at least 64 bytes): without what would be too much."""
        less = (self, replace(self, seen="", cut=True), Unwritten(cut=True, lost=True))
        made = (zlib.compress(json.dumps(asdict(one)).encode(), 1) for one in less)
        return next(data for data in made if len(data) <= most_bytes)

    @classmethod
    def unpacked(cls, data: bytes) -> Unwritten:
        """What ``packed`` made."""
        return cls(**json.loads(zlib.decompress(data)))


def in_memory(text: str) -> Path:
    """A file of this process alone that holds this, on no disk and in no folder; it is there until the process ends."""
    fd = os.memfd_create("pipefill-unwritten", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(text.encode())
    return Path(f"/proc/self/fd/{fd}")
