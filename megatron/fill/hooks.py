"""The bubble bus: what the patched Megatron calls, and what listens.

The patches report plain facts (a schedule began, a forward ran, the rank is about to wait); the bus turns them into
bubbles with a kind and a position in the cycle, and passes these to one listener.  A listener that raises is taken
off and the training goes on: nothing behind the bus may harm the main job.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Protocol

from megatron.fill.types import BubbleKind, CycleKey, RankInfo

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """What hears of one rank's bubbles.  All times are CLOCK_MONOTONIC nanoseconds."""

    def iteration_started(self, iteration: int, now_ns: int) -> None:
        """A training iteration has begun."""

    def iteration_ended(self, now_ns: int) -> None:
        """It has ended, whole."""

    def cycle_started(self, key: CycleKey, now_ns: int) -> None:
        """A schedule begins: the bubbles that follow are numbered from 0 again."""

    def cycle_ended(self) -> None:
        """The bubbles of that schedule are all known."""

    def bubble_opened(self, kind: BubbleKind, index: int, now_ns: int) -> None:
        """The rank is about to wait."""

    def bubble_closed(self, now_ns: int) -> None:
        """The wait is over."""

    def computed(self, name: str, start_ns: int, end_ns: int) -> None:
        """A ``forward`` or ``backward`` of one microbatch ran."""

    def disturbed(self, reason: str) -> None:
        """Something outside the cycle ran (evaluation, a checkpoint): the next cycle may differ from the others."""


class BubbleBus:
    """Follows one rank through its schedule."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.on_parse: Callable[[Namespace], None] | None = None
        self.on_start: Callable[[RankInfo, Namespace], None] | None = None
        self.on_last_backward: Callable[[], None] | None = None
        self.weigh_offload: Callable[[int, int, int], bool] | None = None
        self.clock: Callable[[], int] = time.monotonic_ns
        self._training = False
        self._in_cycle = False
        self._forward_only = False
        self._index = 0
        self._forwards = 0
        self._backwards = 0
        self._passes = 0
        self._open = False

    def parsed(self, args: Namespace) -> None:
        """The command line is parsed.

        Raises:
            ConfigError: a ``--fill-*`` flag has a wrong value; the run must not start.
        """
        if self.on_parse is not None:
            self.on_parse(args)

    def started(self, info: RankInfo, args: Namespace) -> None:
        """Megatron is initialised: its arguments are parsed and its process groups exist."""
        if self.on_start is not None:
            self._guarded(self.on_start, info, args)

    # The patches call what follows in the order in which it happens.

    def begin_iteration(self, iteration: int) -> None:
        self._training = True
        if self.listener is not None:
            self._guarded(self.listener.iteration_started, iteration, self.clock())

    def end_iteration(self) -> None:
        self._end_cycle()
        self._training = False
        if self.listener is not None:
            self._guarded(self.listener.iteration_ended, self.clock())

    def begin_schedule(self, key: CycleKey) -> None:
        """A schedule of ``key.microbatches`` forwards (and backwards) per model chunk begins."""
        self._end_cycle()
        self._in_cycle = True
        self._forward_only = key.forward_only
        self._index = self._forwards = self._backwards = 0
        self._passes = key.microbatches * key.chunks
        if self.listener is not None:
            self._guarded(self.listener.cycle_started, key, self.clock())

    def end_schedule(self) -> None:
        """The schedule is over.  A training iteration's cycle goes on until the iteration's end, with the drain."""
        if not self._training:
            self._end_cycle()

    def open(self, *, for_backward: bool = False) -> None:
        """The rank is about to wait for another stage (``for_backward``: for an output gradient).

        A second call before ``close`` goes on with the same bubble.
        """
        if self._in_cycle and not self._open and self.listener is not None:
            self._open = True
            self._guarded(self.listener.bubble_opened, self._kind(for_backward), self._index, self.clock())

    def close(self) -> None:
        """The wait is over."""
        now_ns = self.clock()
        if self._open:
            self._open = False
            self._index += 1
            if self.listener is not None:
                self._guarded(self.listener.bubble_closed, now_ns)

    def forward(self, start_ns: int) -> None:
        """A forward pass that began at ``start_ns`` has ended."""
        self._forwards += 1
        if self._in_cycle and self.listener is not None:
            self._guarded(self.listener.computed, "forward", start_ns, self.clock())

    def backward(self, start_ns: int) -> None:
        """A backward pass that began at ``start_ns`` has ended."""
        self._backwards += 1
        if self._backwards == self._passes and self._training and self.on_last_backward is not None:
            self.on_last_backward()
        if self._in_cycle and self.listener is not None:
            self._guarded(self.listener.computed, "backward", start_ns, self.clock())

    def offload_pays(self, gained_bytes: int, lost_ns: int, iteration_ns: int) -> bool:
        """Whether to go on moving the optimizer's state to the host, given what that gains and costs an iteration."""
        return self.weigh_offload is not None and self.weigh_offload(gained_bytes, lost_ns, iteration_ns)

    def disturb(self, reason: str) -> None:
        if self.listener is not None:
            self._guarded(self.listener.disturbed, reason)

    @property
    def in_drain(self) -> bool:
        """Whether the last backward is done and the iteration is not: where a collective's wait is a drain bubble."""
        return self._in_cycle and self._training and self._backwards >= self._passes

    def _kind(self, for_backward: bool) -> BubbleKind:
        if self._forwards == 0:
            return BubbleKind.FILL
        if (self._forwards if self._forward_only else self._backwards) >= self._passes:
            return BubbleKind.DRAIN
        if for_backward and self._backwards == 0:
            return BubbleKind.FWD_BWD
        return BubbleKind.INTERIOR

    def _end_cycle(self) -> None:
        if self._in_cycle:
            self._in_cycle = False
            if self.listener is not None:
                self._guarded(self.listener.cycle_ended)

    def _guarded(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception:
            logger.exception("PipeFill failed and is switched off for the rest of the run; the training goes on")
            listener, self.listener = self.listener, None
            self.on_start = None
            shut = getattr(listener, "shut", None)
            if shut is not None:
                try:
                    shut()
                except Exception:
                    logger.exception("the gate could not be shut")


bus = BubbleBus()
