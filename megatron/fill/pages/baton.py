"""The baton: two jobs share a rank's bubbles, and the second gets the time that the first cannot use.

A baton is one page of an anonymous memory file that both workers and their agent map.  The resident job *holds* the
baton while it serves bubbles, and passes it on in each bubble when its next step does not fit any more; the tail job
sleeps until then.  Words: 0 the futex (low 32 bits of the number of the bubble passed on), 1 that number, 2 is 1 while
the baton is held.
"""

from __future__ import annotations

import time

from megatron.fill.linux import futex, memfd
from megatron.fill.pages.gate import LOOK_AGAIN_NS, MOST_WOKEN, OpenBubble, SharedGateReader

_BYTES = 4096


class Baton:
    """A baton, mapped from its descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        page, self._address = memfd.map_page(fd, _BYTES, writable=True)
        self._words, self._word = page.cast("Q"), page.cast("I")
        self._wake = futex.Waker(self._address, MOST_WOKEN)

    @staticmethod
    def create() -> int:
        """Create a baton that no job holds; return its descriptor."""
        return memfd.create("baton", _BYTES)

    @property
    def held(self) -> bool:
        return bool(self._words[2])

    def hold(self) -> None:
        """Take the baton: the resident job serves bubbles from now on."""
        self._words[2] = 1

    def drop(self) -> None:
        """Give up the baton: the resident job has ended.  Wakes the tail job."""
        self._words[2] = 0
        self._wake()

    def pass_on(self, seq: int) -> None:
        """Pass on bubble ``seq``: the resident job is done with it.  Wakes the tail job."""
        self._words[1] = seq
        self._word[0] = seq & 0xFFFFFFFF
        self._wake()

    @property
    def seq(self) -> int:
        """The number of the last bubble that was passed on."""
        return self._words[1]

    def wait(self, seen: int) -> None:
        """Sleep, for at most a second, until another bubble than ``seen`` is passed on or the baton is dropped."""
        futex.wait(self._address, seen & 0xFFFFFFFF, LOOK_AGAIN_NS)  # a timeout, since the holder may die


class TailGate(SharedGateReader):
    """The tail job's view of the gate: a bubble opens when the resident job is done with it."""

    def __init__(self, fd: int, baton: Baton) -> None:
        super().__init__(fd)
        self._baton = baton
        self._seen = baton.seq

    def wait(self, after_seq: int) -> OpenBubble | None:
        if not self._baton.held:
            bubble = super().wait(after_seq)
            return None if self._baton.held else bubble
        if self._baton.seq == self._seen:
            self._baton.wait(self._seen)
        bubble = None
        if self._baton.seq != self._seen:
            self._seen = self._baton.seq
            bubble = self.current(after_seq)
        if bubble is None:
            # The other job can write anything here, and must not make this one spin outside of bubbles.
            time.sleep(futex.NAP_S)
        return bubble

    def over_since(self, seq: int, until_ns: int) -> list[tuple[int, int]]:
        return []  # each was the resident job's first
