"""The gate: one rank's shared-memory word that says "a bubble is open until T, with B bytes free".

One page of an anonymous memory file (``memfd``): it has no name, so nothing is left behind and two runs cannot
collide.  The rank is its only writer; workers map it read-only, so nothing a worker does can reach the rank through
it.  Opening is a handful of stores and one futex wake; so is closing.  There is no lock.

Layout, in 64-bit words of the machine's byte order::

    0  the futex word (low 32 bits): even = shut, odd = open; it grows with every opening and every closing
    1  magic and version
    2  number of the open (or last) bubble, from 1
    3  when it opened            4  when it is expected to end       5  free bytes
    6  phase (Phase)            7  1 while the brake is on
    8  how long all bubbles before this one were open, together
    9  by how much steps may run on after it, in expectation
    10  how many ends are told                   80..  those (``OpenBubble.ends_ns``)
    16..79  when bubble n ended, at 16 + n % 64 (0 while it is open)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Protocol

from megatron.fill.errors import GateError
from megatron.fill.linux import futex, memfd

PAGE_BYTES = 4096
_MAGIC = 0x50495045_00000002
_FUTEX, _VERSION, _SEQ, _OPENED, _DEADLINE, _FREE, _PHASE, _BRAKED, _OPEN_NS, _OVERRUN, _TOLD = range(11)
_CLOSED, _CLOSED_SLOTS, _ENDS = 16, 64, 80
_NEVER_NS = 1 << 62
LOOK_AGAIN_NS = 1_000_000_000  # a signal between a look around and the sleep is noticed then, and a waiter moved away
# Of the waiters: two workers and their agent's two watchers, twice.  A job that queues more delays the others' wakes.
MOST_WOKEN = 8


class Phase(IntEnum):
    """What the main job is doing."""

    TRAINING = 0
    ALONE = 1  # it stands still after its last iteration; the open bubble measures tasks by themselves
    ENDED = 2


@dataclass(frozen=True, slots=True)
class OpenBubble:
    """What a worker knows of a bubble while it is open.

    Attributes:
        deadline_ns: before that it hardly ever ends.
        ends_ns: by when it has ended in 1, 2 ... n of n cases; empty if nothing is known beyond the deadline.
        overrun_ns: by how much steps may run on after its end, in expectation.
    """

    seq: int
    opened_ns: int
    deadline_ns: int
    free_bytes: int
    alone: bool = False
    ends_ns: tuple[int, ...] = ()
    overrun_ns: int = 0

    def fits(self, step_ns: int, now_ns: int, pause_ns: int = 0) -> bool:
        """Whether a step of this length, and the pause after it, may begin now."""
        begin_ns, end_ns = self.window(step_ns)
        return begin_ns <= now_ns and now_ns + step_ns + pause_ns <= end_ns

    def window(self, step_ns: int) -> tuple[int, int]:
        """From when on a step of this length may begin, and when it must have ended.

        Beyond the deadline an end catches one step, which runs on for half its length on average.  So the share of
        cases that may be caught is ``overrun_ns`` over half of ``step_ns``: short steps go on until the bubble is over,
        however long it is, long ones end before even short bubbles do.  Where already the first step might be caught,
        it waits until those bubbles have ended that end soon: in many places nearly all waits are short, and a few are
        long.
        """
        ends = self.ends_ns
        caught = 2 * self.overrun_ns * len(ends) // step_ns if step_ns else 0
        if not caught:
            return self.opened_ns, self.deadline_ns
        first, begin_ns = 0, self.opened_ns
        if self.deadline_ns < begin_ns + step_ns:
            for end_ns, next_ns in pairwise(ends):
                first += 1
                if next_ns >= end_ns + step_ns:
                    begin_ns = max(begin_ns, end_ns)
                    break
            else:
                return begin_ns, self.deadline_ns
        last = first + caught
        return begin_ns, max(self.deadline_ns, ends[last - 1]) if last < len(ends) else _NEVER_NS


class GateWriter(Protocol):
    """The rank's end."""

    def open(self, deadline_ns: int, free_bytes: int, ends_ns: Sequence[int] = (), overrun_ns: int = 0) -> int:
        """Open a bubble, of which this is known (``OpenBubble``); return its number."""

    def close(self, now_ns: int) -> None:
        """The bubble is over."""

    def brake(self, on: bool) -> None:
        """No bubble is opened for a while (or is again), since filling slows the main job down."""

    def end(self) -> None:
        """The main job is over: every waiter returns None from now on."""


class GateReader(Protocol):
    """A worker's end."""

    def wait(self, after_seq: int) -> OpenBubble | None:
        """Sleep until a bubble with a number above ``after_seq`` is open; None when the main job is over, a signal asks
        to look around, or a second is over (call again)."""

    def is_open(self, seq: int) -> bool:
        """Whether bubble ``seq`` is still open."""

    def wait_change(self, seq: int, timeout_ns: int) -> None:
        """Sleep until bubble ``seq`` is over, at most ``timeout_ns`` and a second."""

    def closed_ns(self, seq: int) -> int | None:
        """When bubble ``seq`` ended; None while it is open."""

    @property
    def ended(self) -> bool:
        """Whether the main job is over."""


class SharedGate:
    """The rank's end of a real gate (GateWriter).

    All of its state is in the page, so whoever writes next goes on where the last one stopped.  One writes at a time.

    Args:
        fd: a gate that exists, passed on by the rank to the process that writes it instead; None for a new one.

    Raises:
        GateError: ``fd`` is not a gate of this version.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = memfd.create("gate", PAGE_BYTES, sealable=True) if fd is None else fd
        page, address = memfd.map_page(self.fd, PAGE_BYTES, writable=True)
        self._words, self._word = page.cast("Q"), page.cast("I")
        self._wake = futex.Waker(address, MOST_WOKEN)
        if fd is None:
            self._words[_VERSION] = _MAGIC
        elif self._words[_VERSION] != _MAGIC:
            raise GateError(f"descriptor {fd} is not a gate: found {self._words[_VERSION]:#x}, expected {_MAGIC:#x}")

    def open(self, deadline_ns: int, free_bytes: int, ends_ns: Sequence[int] = (), overrun_ns: int = 0) -> int:
        words = self._words
        words[_TOLD], words[_OVERRUN] = len(ends_ns), overrun_ns
        for place, end_ns in enumerate(ends_ns, _ENDS):
            words[place] = end_ns
        return self._open(deadline_ns, free_bytes, Phase.TRAINING)

    def open_alone(self, deadline_ns: int) -> int:
        """Open a bubble in which the main job stands still, to measure the tasks by themselves."""
        self._words[_TOLD] = 0
        return self._open(deadline_ns, 0, Phase.ALONE)

    def _open(self, deadline_ns: int, free_bytes: int, phase: Phase) -> int:
        words = self._words
        seq = words[_SEQ] + 1
        words[_CLOSED + seq % _CLOSED_SLOTS] = 0
        words[_SEQ] = seq
        words[_DEADLINE] = deadline_ns
        words[_FREE] = free_bytes
        words[_PHASE] = phase
        words[_OPENED] = time.monotonic_ns()
        self._word[0] = (2 * seq + 1) & 0xFFFFFFFF
        self._wake()
        return seq

    def close(self, now_ns: int) -> None:
        if not self._word[0] & 1:
            return
        seq = self._words[_SEQ]
        self._words[_CLOSED + seq % _CLOSED_SLOTS] = now_ns
        self._words[_OPEN_NS] += max(0, now_ns - self._words[_OPENED])
        self._word[0] = (2 * seq + 2) & 0xFFFFFFFF
        self._wake()

    def brake(self, on: bool) -> None:
        self._words[_BRAKED] = on

    def end(self) -> None:
        self.close(time.monotonic_ns())
        self._words[_PHASE] = Phase.ENDED
        self._word[0] = (self._word[0] + 2) & 0xFFFFFFFE
        self._wake()

    @property
    def ended(self) -> bool:
        """Whether it was ended, by us or by who wrote it in our place."""
        return self._words[_PHASE] == Phase.ENDED

    def reader_fd(self) -> int:
        """A new descriptor of the gate through which nothing can be written."""
        return memfd.reader_fd(self.fd)

    def seal(self) -> None:
        """Nobody but this object's process can write to the gate from now on, even who can open it anew."""
        memfd.close_to_writers(self.fd)


class SharedGateReader:
    """A worker's end of a real gate (GateReader), over the descriptor that the agent passed on.

    Raises:
        GateError: the descriptor is not a gate of this version.
    """

    def __init__(self, fd: int) -> None:
        try:
            page, self._address = memfd.map_page(fd, PAGE_BYTES, writable=False)
        except OSError as error:
            raise GateError(f"descriptor {fd} cannot be mapped as a gate: {error}") from error
        self._words, self._word = page.cast("Q"), page.cast("I")
        if self._words[_VERSION] != _MAGIC:
            raise GateError(f"descriptor {fd} is not a gate: found {self._words[_VERSION]:#x}, expected {_MAGIC:#x}")

    def wait(self, after_seq: int) -> OpenBubble | None:
        word = self._word[0]
        if self.ended:
            return None
        if not word & 1 or self._words[_SEQ] <= after_seq:
            futex.wait(self._address, word, LOOK_AGAIN_NS)
        return self.current(after_seq)

    def current(self, after_seq: int = 0) -> OpenBubble | None:
        """The open bubble, if its number is above ``after_seq``."""
        words = self._words
        seq = words[_SEQ]
        if self._word[0] != (2 * seq + 1) & 0xFFFFFFFF or seq <= after_seq:
            return None
        bubble = OpenBubble(
            seq,
            words[_OPENED],
            words[_DEADLINE],
            words[_FREE],
            words[_PHASE] == Phase.ALONE,
            tuple(words[_ENDS : _ENDS + words[_TOLD]]),
            words[_OVERRUN],
        )
        # The fields belong together only if the word did not move while they were read.
        return bubble if self.is_open(seq) else None

    def wait_change(self, seq: int, timeout_ns: int) -> None:
        """Sleep until bubble ``seq`` is over, at most ``timeout_ns`` and a second."""
        word = (2 * seq + 1) & 0xFFFFFFFF
        if self._word[0] == word:
            futex.wait(self._address, word, min(timeout_ns, LOOK_AGAIN_NS))

    def is_open(self, seq: int) -> bool:
        return self._word[0] == (2 * seq + 1) & 0xFFFFFFFF

    def closed_ns(self, seq: int) -> int | None:
        return self._words[_CLOSED + seq % _CLOSED_SLOTS] or None

    @property
    def seq(self) -> int:
        """The number of the open or last bubble."""
        return self._words[_SEQ]

    @property
    def shut(self) -> bool:
        """Whether no bubble is open."""
        return not self._word[0] & 1

    @property
    def braked(self) -> bool:
        """Whether the brake is on: nothing of a worker is to run."""
        return bool(self._words[_BRAKED])

    def open_ns(self) -> int:
        """How long bubbles have been open in all, the present one included."""
        words = self._words
        return words[_OPEN_NS] + (0 if self.shut else max(0, time.monotonic_ns() - words[_OPENED]))

    @property
    def ended(self) -> bool:
        return self._words[_PHASE] == Phase.ENDED
