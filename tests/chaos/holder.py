"""Side tasks that hold memory while the training grows."""

from __future__ import annotations

from tests.chaos.marks import Note, mark
from tests.chaos.tasks import Honest


class MemoryHolder(Honest):
    """Holds memory and cannot release it: it is saved and stopped, and resumes when there is room."""

    held_bytes = 256 << 20

    def init(self) -> None:
        self.memory = bytearray(b"x") * self.held_bytes
        if self.done:
            mark(self.marks, Note.HELD, f"it goes on from step {self.done}")


class Shrinking(MemoryHolder):
    """Releases its memory on request."""

    def shrink(self, memory_bytes: int) -> bool:
        mark(self.marks, Note.HELD, f"asked to hold no more than {memory_bytes} bytes")
        self.memory = bytearray()
        return True
