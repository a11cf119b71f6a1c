"""The gate: one rank's shared-memory word that says "a bubble is open until T, with B bytes free".

It is one page of an anonymous memory file (``memfd``), which leaves nothing behind.  The rank is its only writer;
workers map it read-only, so no worker can reach the rank through it.  Opening is a handful of stores and one futex
wake; so is closing.  There is no lock.

Layout, in 64-bit words of the machine's byte order; times in ns of CLOCK_MONOTONIC::

    0  the futex word (low 32 bits): even = shut, odd = open; grows with every opening and every closing
    1  magic and version
    2  number of the open (or last) bubble, from 1
    3  its start                4  its deadline                      5  free bytes
    6  phase (Phase)            7  1 while the brake is on
    8  total time that all bubbles before this one were open
    9  number of predicted ends, of which 80.. are the times, and 96.. the longest steps that they may catch
    16..79    end of bubble n, at 16 + n % 64 (0 while it is open)
    112..175  its start, at 112 + n % 64
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from megatron.fill.errors import GateError
from megatron.fill.linux import futex, memfd

PAGE_BYTES = 4096
_MAGIC = 0x50495045_00000004
_FUTEX, _VERSION, _SEQ, _OPENED, _DEADLINE, _FREE, _PHASE, _BRAKED, _OPEN_NS, _TOLD = range(10)
_CLOSED, _SLOTS, _ENDS, _STEPS, _STARTS = 16, 64, 80, 96, 112
_NEVER_NS = 1 << 62
# Timeout of every sleep: notices a signal that came just before the sleep, and waiters that were requeued elsewhere.
LOOK_AGAIN_NS = 1_000_000_000
# Waiters woken at once: two workers and their agent's two watchers, twice.  A job that queues more delays other wakes.
MOST_WOKEN = 8


class Phase(IntEnum):
    TRAINING = 0
    ALONE = 1  # the training stands still after its last iteration; the open bubble measures tasks by themselves
    ENDED = 2


@dataclass(frozen=True, slots=True)
class OpenBubble:
    """An open bubble, as workers see it."""

    seq: int  # number of the bubble, from 1
    opened_ns: int  # start of the bubble
    deadline_ns: int  # time before which the bubble hardly ever ends
    free_bytes: int  # device memory that the training leaves free in it
    alone: bool = False  # True if the training stands still, to measure tasks by themselves
    # Times by which it has ended in 1, 2 ... n of n cases; empty if no end beyond the deadline is predicted.
    ends_ns: tuple[int, ...] = ()
    # For each of these cases, the longest step that the end may catch; as many as ``ends_ns``.
    steps_ns: tuple[int, ...] = ()

    def fits(self, step_ns: int, now_ns: int, pause_ns: int = 0) -> bool:
        """True if a step of ``step_ns``, followed by a pause of ``pause_ns``, may begin now."""
        begin_ns, end_ns = self.window(step_ns, now_ns, pause_ns)
        return begin_ns <= now_ns and now_ns + step_ns + pause_ns <= end_ns

    def window(self, step_ns: int, now_ns: int, pause_ns: int = 0) -> tuple[int, int]:
        """The next stretch of the bubble with room for a step of ``step_ns`` and a pause: its start and its end.

        Until the deadline any step may run.  Beyond it, the bubble ends between two of ``ends_ns`` in one of n cases,
        and the end catches one step, which runs on for half its length on average.  The stretch between the two is part
        of the window if that step may be so long.  So a short step runs until the bubble is over, a long one only where
        an end is unlikely for long: at many places in the schedule nearly all waits are short, and a few are long, as
        is known once the short ones would have ended.

        Without room, it is the stretch up to the deadline.
        """
        begin_ns, end_ns = self.opened_ns, self.deadline_ns
        before_ns = max(begin_ns, end_ns)
        most = len(self.ends_ns) if step_ns else 0
        follows = True
        for number in range(most):
            case_ns = self.ends_ns[number]
            may = step_ns <= self.steps_ns[number]
            if may:
                if not follows:  # bubbles end in between, if only at one moment
                    if _has_room(begin_ns, end_ns, now_ns, step_ns + pause_ns):
                        break
                    begin_ns = before_ns
                end_ns = max(before_ns, case_ns) if number < most - 1 else _NEVER_NS
            before_ns, follows = max(before_ns, case_ns), may
        if _has_room(begin_ns, end_ns, now_ns, step_ns + pause_ns):
            return begin_ns, end_ns
        return self.opened_ns, self.deadline_ns


def _has_room(begin_ns: int, end_ns: int, now_ns: int, needed_ns: int) -> bool:
    return max(begin_ns, now_ns) + needed_ns <= end_ns


class GateWriter(Protocol):
    """The writer's end of a gate: the rank's, or its relay's on CUDA."""

    def open(self, deadline_ns: int, free_bytes: int, ends_ns: Sequence[int] = (), steps_ns: Sequence[int] = ()) -> int:
        """Open a bubble (arguments as in ``OpenBubble``); return its number."""

    def close(self, now_ns: int) -> None:
        """Close the open bubble, if there is one."""

    def brake(self, on: bool) -> None:
        """Record that the brake is on or off: while filling slows the training, no bubble is opened."""

    def end(self) -> None:
        """Record that the training is over: every ``wait`` returns None from now on."""


class GateReader(Protocol):
    """A worker's end of a gate."""

    def wait(self, after_seq: int) -> OpenBubble | None:
        """Sleep until a bubble with a number above ``after_seq`` is open, and return it.

        Returns None when the training is over, on a signal, or after a second (call again).
        """

    def is_open(self, seq: int) -> bool:
        """True if bubble ``seq`` is still open."""

    def wait_change(self, seq: int, timeout_ns: int) -> None:
        """Sleep until bubble ``seq`` is over, for at most ``timeout_ns`` and at most a second."""

    def closed_ns(self, seq: int) -> int | None:
        """The end of bubble ``seq``; None while it is open."""

    def over_since(self, seq: int, until_ns: int) -> list[tuple[int, int]]:
        """Return number and length in ns of the latest bubbles after ``seq`` that were over at ``until_ns``."""

    @property
    def ended(self) -> bool:
        """True if the training is over."""


class SharedGateReader:
    """A worker's end of a gate in shared memory (GateReader); GateError if the descriptor is not of this version."""

    def __init__(self, fd: int, *, writable: bool = False) -> None:
        try:
            page, self._address = memfd.map_page(fd, PAGE_BYTES, writable=writable)
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
        """The open bubble if its number is above ``after_seq``, else None."""
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
            tuple(words[_STEPS : _STEPS + words[_TOLD]]),
        )
        # The fields belong together only if the word did not change while they were read.
        return bubble if self.is_open(seq) else None

    def wait_change(self, seq: int, timeout_ns: int) -> None:
        word = (2 * seq + 1) & 0xFFFFFFFF
        if self._word[0] == word:
            futex.wait(self._address, word, min(timeout_ns, LOOK_AGAIN_NS))

    def is_open(self, seq: int) -> bool:
        return self._word[0] == (2 * seq + 1) & 0xFFFFFFFF

    def closed_ns(self, seq: int) -> int | None:
        return self._words[_CLOSED + seq % _SLOTS] or None

    def over_since(self, seq: int, until_ns: int) -> list[tuple[int, int]]:
        words, latest = self._words, self._words[_SEQ]
        found = []
        for number in range(max(seq + 1, latest - _SLOTS // 2), latest + 1):  # older ones are soon written over
            start_ns, end_ns = words[_STARTS + number % _SLOTS], words[_CLOSED + number % _SLOTS]
            if start_ns <= end_ns <= until_ns:
                found.append((number, end_ns - start_ns))
        return found

    @property
    def seq(self) -> int:
        """The number of the open or last bubble."""
        return self._words[_SEQ]

    @property
    def shut(self) -> bool:
        return not self._word[0] & 1

    @property
    def braked(self) -> bool:
        """True if the brake is on: no job may run."""
        return bool(self._words[_BRAKED])

    def open_ns(self) -> int:
        """The total time in ns that bubbles have been open, the present one included."""
        words = self._words
        return words[_OPEN_NS] + (0 if self.shut else max(0, time.monotonic_ns() - words[_OPENED]))

    @property
    def ended(self) -> bool:
        return self._words[_PHASE] == Phase.ENDED


class SharedGate(SharedGateReader):
    """The writer's end of a gate in shared memory (GateWriter), new or on a descriptor that the rank passed on.

    All of its state is in the page, so a new writer resumes where the last one stopped.  One process writes at a time.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = memfd.create("gate", PAGE_BYTES, sealable=True)
            os.pwrite(fd, _MAGIC.to_bytes(8, sys.byteorder), 8 * _VERSION)
        super().__init__(fd, writable=True)
        self.fd = fd
        self._wake = futex.Waker(self._address, MOST_WOKEN)

    def open(self, deadline_ns: int, free_bytes: int, ends_ns: Sequence[int] = (), steps_ns: Sequence[int] = ()) -> int:
        words = self._words
        told = words[_TOLD] = len(steps_ns)
        for number in range(told):
            words[_ENDS + number] = ends_ns[number]
            words[_STEPS + number] = steps_ns[number]
        return self._open(deadline_ns, free_bytes, Phase.TRAINING)

    def open_alone(self, deadline_ns: int) -> int:
        """Open a bubble in which the training stands still, to measure the tasks by themselves."""
        self._words[_TOLD] = 0
        return self._open(deadline_ns, 0, Phase.ALONE)

    def _open(self, deadline_ns: int, free_bytes: int, phase: Phase) -> int:
        words = self._words
        seq = words[_SEQ] + 1
        words[_CLOSED + seq % _SLOTS] = 0
        words[_SEQ] = seq
        words[_DEADLINE] = deadline_ns
        words[_FREE] = free_bytes
        words[_PHASE] = phase
        words[_OPENED] = words[_STARTS + seq % _SLOTS] = time.monotonic_ns()
        self._word[0] = (2 * seq + 1) & 0xFFFFFFFF
        self._wake()
        return seq

    def close(self, now_ns: int) -> None:
        if not self._word[0] & 1:
            return
        seq = self._words[_SEQ]
        self._words[_CLOSED + seq % _SLOTS] = now_ns
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

    def reader_fd(self) -> int:
        return memfd.reader_fd(self.fd)

    def seal(self) -> None:
        """Let only existing mappings write to the gate from now on, even if another process reopens it."""
        memfd.close_to_writers(self.fd)
