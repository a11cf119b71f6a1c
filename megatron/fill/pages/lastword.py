"""What a process beside a rank leaves to it, because no file takes it: one anonymous memory file.

The relay leaves the end of the rank's record there, the agent what its jobs did.  No worker has the descriptor.

Layout: a word of 8 bytes, the state; a word, the length of what is left; then that.
"""

from __future__ import annotations

import os
import struct
from enum import IntEnum

from megatron.fill.linux import memfd

MOST_BYTES = 4 << 20
_HEAD = struct.Struct("=QQ")
_NAME = "last-word"


class Left(IntEnum):
    """How it stands with what its writer has to say."""

    NOTHING = 0  # all of it is in a file
    HERE = 1  # what is in no file is here
    LOST = 2  # it is not: it was too much, or its writer died while it wrote it, or before another one followed


class LastWord:
    """The page; the writer and the rank have a descriptor each."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._succeeded = False  # the writer before left something that is lost

    @classmethod
    def create(cls) -> LastWord:
        """A new one; its memory is taken when something is left."""
        return cls(memfd.create(_NAME, _HEAD.size + MOST_BYTES))

    @property
    def state(self) -> Left:
        return Left(self._head()[0])

    def succeed(self) -> None:
        """Another writer follows one that died: what that one could not write is lost."""
        if self.state is not Left.NOTHING:
            self._succeeded = True
            self._say(Left.LOST)

    def clear(self) -> None:
        """All is in a file now."""
        if not self._succeeded:
            self._say(Left.NOTHING)

    def leave(self, data: bytes | None) -> None:
        """This is in no file now, in place of what was left before; None if it is too much."""
        self._say(Left.LOST)
        if self._succeeded or data is None or len(data) > MOST_BYTES:
            return
        os.pwrite(self.fd, data, _HEAD.size)
        self._say(Left.HERE, len(data))

    def read(self) -> bytes:
        """What is left; nothing unless the state is HERE."""
        state, length = self._head()
        return os.pread(self.fd, min(length, MOST_BYTES), _HEAD.size) if state == Left.HERE else b""

    def _head(self) -> tuple[int, int]:
        state, length = _HEAD.unpack(os.pread(self.fd, _HEAD.size, 0))
        return state, length

    def _say(self, state: Left, length: int = 0) -> None:
        os.pwrite(self.fd, _HEAD.pack(state, length), 0)
