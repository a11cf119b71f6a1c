"""The baton: how two jobs share a rank's bubbles, the second one getting what the first one cannot use.

One page of an anonymous memory file that both workers and their agent map.  The resident job *holds* the baton while it
serves bubbles, and passes it on in each of them when its next step does not fit any more; the tail job sleeps until
then.  Words: 0 the futex (low 32 bits of the number of the bubble passed on), 1 that number, 2 whether it is held.
"""

from __future__ import annotations

import time

from megatron.fill.linux import futex, memfd
from megatron.fill.pages.gate import LOOK_AGAIN_NS, MOST_WOKEN, OpenBubble, SharedGateReader

_BYTES = 4096


class Baton:
    """Every end of a baton, over its descriptor."""

    def __init__(self, fd: int) -> None:
        page, self._address = memfd.map_page(fd, _BYTES, writable=True)
        self._words, self._word = page.cast("Q"), page.cast("I")
        self._wake = futex.Waker(self._address, MOST_WOKEN)

    @staticmethod
    def create() -> int:
        """A new baton that nobody holds; returns its descriptor."""
        return memfd.create("baton", _BYTES)

    @property
    def held(self) -> bool:
        return bool(self._words[2])

    def hold(self) -> None:
        """The resident job serves bubbles from now on."""
        self._words[2] = 1

    def drop(self) -> None:
        """The resident job is gone."""
        self._words[2] = 0
        self._wake()

    def pass_on(self, seq: int) -> None:
        """The resident job is done with bubble ``seq``."""
        self._words[1] = seq
        self._word[0] = seq & 0xFFFFFFFF
        self._wake()

    @property
    def seq(self) -> int:
        """The last bubble that was passed on."""
        return self._words[1]

    def wait(self, seen: int) -> None:
        """Sleep until another bubble than ``seen`` is passed on, the baton is dropped, a signal comes, or a second
        is over."""
        futex.wait(self._address, seen & 0xFFFFFFFF, LOOK_AGAIN_NS)  # the holder may die


class TailGate:
    """The gate as the tail job sees it (GateReader): bubbles open when the resident job is done with them."""

    def __init__(self, gate: SharedGateReader, baton: Baton) -> None:
        self._gate = gate
        self._baton = baton
        self._seen = baton.seq

    def wait(self, after_seq: int) -> OpenBubble | None:
        if not self._baton.held:
            bubble = self._gate.wait(after_seq)
            return None if self._baton.held else bubble
        if self._baton.seq == self._seen:
            self._baton.wait(self._seen)
        bubble = None
        if self._baton.seq != self._seen:
            self._seen = self._baton.seq
            bubble = self._gate.current(after_seq)
        if bubble is None:
            # The other job can write here whatever it likes, and is not to keep this one busy outside of bubbles.
            time.sleep(futex.NAP_S)
        return bubble

    def is_open(self, seq: int) -> bool:
        return self._gate.is_open(seq)

    def wait_change(self, seq: int, timeout_ns: int) -> None:
        self._gate.wait_change(seq, timeout_ns)

    def closed_ns(self, seq: int) -> int | None:
        return self._gate.closed_ns(seq)

    @property
    def ended(self) -> bool:
        return self._gate.ended
