"""The rank's listener where the host runs ahead of the device: it passes every fact on, to be timed by the device."""

from __future__ import annotations

from collections.abc import Callable

from megatron.fill.errors import FillError
from megatron.fill.pages.ring import Fact, Ring
from megatron.fill.rank.signals import Signals
from megatron.fill.types import BubbleKind, CycleKey


class StreamListener:
    """A hooks.Listener that writes facts into a ring and marks their places in the stream.

    The times that the bus gives are the host's and are not used.

    Args:
        free_bytes: the device memory that the main job leaves free, now.  It is asked when a bubble has been marked,
            so what is said of its opening is from the bubble before.
        relayed: whether the relay, which reads the ring, is alive; asked once an iteration, must not block.
        on_shut: called once when the bus takes this listener off after a failure; must not block.
    """

    def __init__(
        self,
        ring: Ring,
        signals: Signals,
        free_bytes: Callable[[], int],
        relayed: Callable[[], bool] = lambda: True,
        on_shut: Callable[[], None] = lambda: None,
    ) -> None:
        self.free_bytes = free_bytes
        self._free_bytes = free_bytes()
        self._promised: int | None = None  # in the bubble that is open
        self._write = ring.write
        self._mark = signals.mark
        self._relayed = relayed
        self._on_shut = on_shut
        self._is_shut = False

    def iteration_started(self, iteration: int, now_ns: int) -> None:
        if not self._relayed():
            raise FillError("the relay of this rank has died")
        self._write(Fact.ITERATION_STARTED, number=iteration)
        self._mark()

    def iteration_ended(self, now_ns: int) -> None:
        self._write(Fact.ITERATION_ENDED)
        self._mark()

    def cycle_started(self, key: CycleKey, now_ns: int) -> None:
        chunks = -key.chunks if key.forward_only else key.chunks
        self._write(Fact.CYCLE_STARTED, key.microbatches, chunks, text=key.schedule)
        self._mark()

    def cycle_ended(self) -> None:
        self._write(Fact.CYCLE_ENDED, marked=False)

    def bubble_opened(self, kind: BubbleKind, index: int, now_ns: int, free_bytes: int | None = None) -> None:
        self._promised = free_bytes
        self._write(Fact.BUBBLE_OPENED, index, free_bytes=self._free(), text=kind)
        self._mark()
        self._free_bytes = self.free_bytes()  # asking takes the driver a while: not before the mark

    def bubble_closed(self, now_ns: int) -> None:
        self._write(Fact.BUBBLE_CLOSED, free_bytes=self._free())
        self._mark()

    def _free(self) -> int:
        return self._free_bytes if self._promised is None else self._promised

    def computed(self, name: str, start_ns: int, end_ns: int) -> None:
        self._write(Fact.COMPUTED, text=name)
        self._mark()

    def disturbed(self, reason: str) -> None:
        self._write(Fact.DISTURBED, text=reason, marked=False)

    def end(self) -> None:
        """The training is over: the relay ends when the device has got here."""
        if not self._is_shut:
            self._write(Fact.END)
            self._mark()

    def shut(self) -> None:
        """Called when the bus takes this listener off after a failure: no bubble opens any more."""
        self._is_shut = True
        self._on_shut()
