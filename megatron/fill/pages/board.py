"""The cycle board: a rank shows its bubble cycle to its agent and workers, for their execution plans.

Like the gate, it is an anonymous memory file of a few pages: the rank is the only writer, everyone else maps it
read-only.  Readers take no lock: one that meets a half-written cycle reads again (a sequence lock)::

    0  version: odd while being written     1  the cycle's period in ns     2  number of bubbles that follow
    3..  kind, duration in ns, free bytes of each bubble; after 1024 of them, the rank's pulse (``pages/pulse.py``)
"""

from __future__ import annotations

from megatron.fill.linux import memfd
from megatron.fill.pages.pulse import KINDS, WORDS, Pulse, read_pulse, write_pulse
from megatron.fill.profiles import BubbleCycle, BubbleSlot

_MOST_SLOTS = 1024
_PULSE = 3 + 3 * _MOST_SLOTS
BOARD_BYTES = 8 * (_PULSE + WORDS)


class CycleBoard:
    """The writer's end, on a new board or on that of a descriptor which the rank passed on."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = memfd.create("cycle", BOARD_BYTES, sealable=True) if fd is None else fd
        page, _ = memfd.map_page(self.fd, BOARD_BYTES, writable=True)
        self._words = page.cast("Q")

    def show(self, cycle: BubbleCycle) -> None:
        """Replace the cycle on the board.  Bubbles beyond the first 1024 are left out."""
        words = self._words
        slots = cycle.slots[:_MOST_SLOTS]
        words[0] += 1
        words[1], words[2] = cycle.period_ns, len(slots)
        for at, slot in enumerate(slots):
            words[3 + 3 * at] = KINDS.index(slot.kind)
            words[4 + 3 * at] = slot.duration_ns
            words[5 + 3 * at] = slot.free_bytes
        words[0] += 1

    def beat(self, pulse: Pulse) -> None:
        """Replace the pulse on the board.  May be called from another thread than ``show``."""
        write_pulse(self._words[_PULSE:], pulse)

    def reader_fd(self) -> int:
        """Return a new, read-only descriptor of the board."""
        return memfd.reader_fd(self.fd)

    def seal(self) -> None:
        """Let only existing mappings write to the board from now on, even if another process reopens it."""
        memfd.close_to_writers(self.fd)


class CycleBoardReader:
    """A reader's end, over the descriptor that the rank or the agent passed on."""

    def __init__(self, fd: int) -> None:
        page, _ = memfd.map_page(fd, BOARD_BYTES, writable=False)  # Python's mmap would keep a descriptor
        self._words = page.cast("Q")

    @property
    def version(self) -> int:
        """The version of the cycle: even, grows with every cycle shown, 0 before the first."""
        return self._words[0] & ~1

    def pulse(self) -> Pulse | None:
        """The rank's latest pulse; None before the first, or while one is being written."""
        return read_pulse(self._words[_PULSE:])

    def read(self) -> BubbleCycle | None:
        """The cycle on the board; None before the first, or while one is being written (read again later)."""
        words = self._words
        version = words[0]
        if version == 0 or version & 1:
            return None
        period_ns, count = words[1], min(words[2], _MOST_SLOTS)
        rows = words[3 : 3 + 3 * count].tolist()
        if words[0] != version:
            return None
        slots = zip(rows[0::3], rows[1::3], rows[2::3], strict=True)
        return BubbleCycle(period_ns, tuple(BubbleSlot(KINDS[kind], duration, free) for kind, duration, free in slots))
