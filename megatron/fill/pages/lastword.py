"""Records that a rank's helper process could not write to a file, left to the rank in an anonymous memory file.

The relay leaves the end of the rank's record there, the agent leaves its jobs' records.  No worker has the descriptor.

Layout: the state, a word of 8 bytes; the length of the data, a word of 8 bytes; the data.
"""

from __future__ import annotations

import os
import struct
from enum import IntEnum

from megatron.fill.linux import memfd

MOST_BYTES = 4 << 20
_HEAD = struct.Struct("=QQ")


class Left(IntEnum):
    """The state of the data that is in no file."""

    NOTHING = 0  # all data is in a file
    HERE = 1  # the data is in the page
    LOST = 2  # the data is lost: it was too long, or its writer died while writing it or before it was in a file


class LastWord:
    """The memory file; the writer and the rank have a descriptor each."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._succeeded = False  # True if the previous writer left data that is lost

    @classmethod
    def create(cls) -> LastWord:
        """Create an empty one; its memory is allocated when data is left."""
        return cls(memfd.create("last-word", _HEAD.size + MOST_BYTES))

    @property
    def state(self) -> Left:
        return Left(self._head()[0])

    def succeed(self) -> None:
        """Start a new writer after one that died: data that was in no file yet is lost."""
        if self.state is not Left.NOTHING:
            self._succeeded = True
            self._say(Left.LOST)

    def clear(self) -> None:
        """Record that all data is in a file now."""
        if not self._succeeded:
            self._say(Left.NOTHING)

    def leave(self, data: bytes | None) -> None:
        """Replace the data by ``data``, which is in no file; None records that there is too much, so it is lost."""
        self._say(Left.LOST)
        if self._succeeded or data is None or len(data) > MOST_BYTES:
            return
        os.pwrite(self.fd, data, _HEAD.size)
        self._say(Left.HERE, len(data))

    def read(self) -> bytes:
        """The data; empty unless the state is HERE."""
        state, length = self._head()
        return os.pread(self.fd, min(length, MOST_BYTES), _HEAD.size) if state == Left.HERE else b""

    def _head(self) -> tuple[int, int]:
        state, length = _HEAD.unpack(os.pread(self.fd, _HEAD.size, 0))
        return state, length

    def _say(self, state: Left, length: int = 0) -> None:
        os.pwrite(self.fd, _HEAD.pack(state, length), 0)
