"""The rank's listener on CUDA, where the host runs ahead: it passes every fact on, to be timed by the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.fill.errors import FillError
from megatron.fill.pages.ring import Fact, Ring
from megatron.fill.rank.blocks import Blocks
from megatron.fill.rank.signals import Signals
from megatron.fill.types import PIPELINE_KINDS, BubbleKind, CycleKey

_PEAKS = 2  # number of iterations after which the training has reached its peak memory
_ASK_EVERY = 20  # iterations between two calls of ``missing_bytes``
_NOT_SAID = -1


@dataclass(eq=False, repr=False)
class StreamListener:
    """A hooks.Listener that writes facts into a ring and marks their places in the stream.

    The times from the bus are the host's and are not used.  Bubbles outside the pipeline are left out: the host waits
    there while the GPU may still copy, in streams without marks.
    """

    ring: Ring
    signals: Signals
    # Returns the part of the training's own memory margin that cannot be reserved; called every few iterations and
    # after a disturbance, between two iterations.
    missing_bytes: Callable[[], int] = lambda: 0
    relayed: Callable[[], bool] = lambda: True  # returns True while the relay is alive; must not block
    on_shut: Callable[[], None] = lambda: None  # called after a failure; must not block
    blocks: Blocks | None = None  # equal to those of the relay's listener; None to watch every iteration

    def __post_init__(self) -> None:
        self._missing_bytes = 0
        self._ask_in = _PEAKS  # iterations until the next call of ``missing_bytes``
        self._write = self.ring.write
        self._mark = self.signals.mark
        self._is_shut = False
        self._outside = False  # the open bubble is outside the pipeline

    def iteration_started(self, iteration: int, now_ns: int) -> None:
        if not self.relayed():
            raise FillError("the relay of this rank has died")
        if not self._ask_in:
            self._missing_bytes, self._ask_in = self.missing_bytes(), _ASK_EVERY
        self._ask_in -= 1
        if self.blocks is not None:
            self.blocks.iteration_started()
        self._write(Fact.ITERATION_STARTED, index=not self.watching, number=iteration, amount=self._missing_bytes)
        self._mark()

    @property
    def watching(self) -> bool:
        return self.blocks is None or self.blocks.watched

    def iteration_ended(self, now_ns: int) -> None:
        self._write(Fact.ITERATION_ENDED)
        self._mark()

    def cycle_started(self, key: CycleKey, now_ns: int) -> None:
        chunks = -key.chunks if key.forward_only else key.chunks
        self._write(Fact.CYCLE_STARTED, key.microbatches, chunks, amount=key.group_size, text=key.schedule)
        self._mark()

    def bubble_opened(self, kind: BubbleKind, index: int, now_ns: int, free_bytes: int | None = None) -> None:
        self._outside = kind not in PIPELINE_KINDS
        if self._outside:
            return
        self._write(Fact.BUBBLE_OPENED, index, amount=_NOT_SAID if free_bytes is None else free_bytes, text=kind)
        self._mark()

    def bubble_closed(self, now_ns: int) -> None:
        if self._outside:
            return
        self._write(Fact.BUBBLE_CLOSED)
        self._mark()

    def computed(self, name: str, start_ns: int, end_ns: int) -> None:
        self._write(Fact.COMPUTED, text=name)
        self._mark()

    def disturbed(self, reason: str) -> None:
        self._ask_in = 0
        self._write(Fact.DISTURBED, text=reason, marked=False)

    def end(self) -> None:
        """Mark the end of the training, at which the relay ends once the device has reached it."""
        if not self._is_shut:
            self._write(Fact.END)
            self._mark()

    def shut(self) -> None:
        self._is_shut = True
        self.on_shut()
