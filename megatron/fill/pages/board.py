"""The cycle board: a rank shows its bubble cycle to its agent and workers, for their execution plans, and its pulse.

Like the gate, it is an anonymous memory file of a few pages: the rank is the only writer, everyone else maps it
read-only.  Readers take no lock: one that meets a half-written cycle reads again (a sequence lock)::

    0  version: odd while being written     1  the cycle's period in ns     2  number of bubbles that follow
    3..  kind, duration in ns, free bytes of each bubble

The pulse is the rank's last progress and the bubble that it waits in.  A thread of the rank (the relay's, on CUDA)
writes it every ``LOOK_S``, behind the words of 1024 bubbles; times in ns::

    0  time of this pulse, CLOCK_MONOTONIC; 0 before the first, and while one is being written
    1  time at which an iteration last ended or a schedule last began    2  the iteration
    3  the longest iteration or standstill so far                        4  1 + the kind of the open bubble; 0 for none
    5  start of that bubble        6  the rank's stage        7  number of stages
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.linux import memfd
from megatron.fill.profiles import BubbleCycle, BubbleSlot
from megatron.fill.types import BubbleKind

_MOST_SLOTS = 1024
_PULSE = slice(3 + 3 * _MOST_SLOTS, 11 + 3 * _MOST_SLOTS)
BOARD_BYTES = 8 * _PULSE.stop
LOOK_S = 10.0  # period of the pulse
_S = 1e9
_KINDS = tuple(BubbleKind)
_LEAST_S, _FIRST_S = 30.0, 300.0  # the least patience, and the patience before the first iteration has ended
_TIMES = 10  # patience as a multiple of the longest iteration or standstill so far


@dataclass(frozen=True, slots=True)
class Pulse:
    """A pulse; times in ns, CLOCK_MONOTONIC."""

    looked_ns: int  # time of the pulse
    moved_ns: int  # time at which an iteration last ended, or a schedule (of an iteration, an evaluation) last began
    iteration: int  # last iteration that began; 0 before the first
    longest_ns: int  # longest iteration or standstill so far; 0 before the first iteration has ended
    waits: BubbleKind | None  # kind of the open bubble; None outside of bubbles
    waits_since_ns: int  # start of that bubble
    stage: int  # pipeline stage of the rank
    stages: int  # number of pipeline stages

    @property
    def patience_s(self) -> float:
        """Seconds without progress before a stall is reported: ten times the longest so far, and at least 30 s."""
        return max(_LEAST_S, _TIMES * self.longest_ns / _S) if self.longest_ns else _FIRST_S

    def still_s(self, now_ns: int) -> float:
        """Seconds without progress, as far as is known; 0 while that is usual.

        A process whose pulse has stopped counts as still since its last progress.
        """
        silent = self.silent(now_ns)
        still_s = ((now_ns if silent else self.looked_ns) - self.moved_ns) / _S
        return still_s if silent or still_s > self.patience_s else 0.0

    def silent(self, now_ns: int) -> bool:
        """True if the pulse is overdue: the thread that writes it is stopped or stuck."""
        return now_ns - self.looked_ns > 3 * LOOK_S * _S

    def waits_for(self, now_ns: int) -> str:
        """A phrase for the log: the stage that the rank waits for, and for how long."""
        if self.waits is None:
            return "is in no bubble: it computes, writes a checkpoint, or waits outside of the pipeline"
        whom = {
            BubbleKind.FILL: f"stage {(self.stage - 1) % self.stages}, for its first forward",
            BubbleKind.FWD_BWD: f"stage {(self.stage + 1) % self.stages}, for its first backward",
            BubbleKind.INTERIOR: "a neighbouring stage",
            BubbleKind.DRAIN: "all stages, in a collective after its last backward",
            BubbleKind.SAVE: "other ranks, in a checkpoint's save",
            BubbleKind.DATA: "the next batch",
            BubbleKind.GROUP: "other ranks, such as its replicas, in a collective",
        }[self.waits]
        return f"waits for {whom} ({self.waits} bubble), for {(now_ns - self.waits_since_ns) / _S:.0f} s"


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
            words[3 + 3 * at] = _KINDS.index(slot.kind)
            words[4 + 3 * at] = slot.duration_ns
            words[5 + 3 * at] = slot.free_bytes
        words[0] += 1

    def beat(self, pulse: Pulse) -> None:
        """Replace the pulse on the board.  May be called from another thread than ``show``."""
        words = self._words[_PULSE]
        words[0] = 0  # a reader in the middle of it finds that it is being written
        waits = 0 if pulse.waits is None else 1 + _KINDS.index(pulse.waits)
        rest = pulse.moved_ns, pulse.iteration, pulse.longest_ns, waits, pulse.waits_since_ns, pulse.stage, pulse.stages
        for at, value in enumerate(rest, 1):
            words[at] = value
        words[0] = pulse.looked_ns

    def reader_fd(self) -> int:
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
        words = self._words[_PULSE]
        looked_ns, moved_ns, iteration, longest_ns, waits, since_ns, stage, stages = words.tolist()
        if not looked_ns or words[0] != looked_ns or waits > len(_KINDS):
            return None
        kind = _KINDS[waits - 1] if waits else None
        return Pulse(looked_ns, moved_ns, iteration, longest_ns, kind, since_ns, stage, max(1, stages))

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
        return BubbleCycle(period_ns, tuple(BubbleSlot(_KINDS[kind], duration, free) for kind, duration, free in slots))
