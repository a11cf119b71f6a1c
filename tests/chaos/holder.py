"""Side tasks that hold memory while the main job grows."""

from __future__ import annotations

from tests.chaos.marks import Note, mark
from tests.chaos.tasks import Honest


class MemoryHolder(Honest):
    """Holds memory, and cannot give it back: it is saved and stopped, and goes on when there is room."""

    held_bytes = 256 << 20

    def init(self) -> None:
        self.memory = bytearray(b"x") * self.held_bytes
        if self.done:
            mark(self.marks, Note.HELD, f"it goes on from step {self.done}")


class Shrinking(MemoryHolder):
    """Gives it back when it is asked to."""

    def shrink(self, memory_bytes: int) -> bool:
        mark(self.marks, Note.HELD, f"asked to hold no more than {memory_bytes} bytes")
        self.memory = bytearray()
        return True
