"""The bubble bus: what the patched Megatron calls, and what listens.

The patches report plain facts (a schedule began, a forward ran, the rank is about to wait); the bus turns them into
bubbles with a kind and a position in the cycle, and passes these to one listener.  A listener that raises is taken
off and the training goes on: nothing behind the bus may harm the main job.  The author of a schedule can mark bubbles
by hand (``bubble``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Protocol

from megatron.fill.types import BubbleKind, CycleKey

logger = logging.getLogger(__name__)

_OFF = "PipeFill failed and is switched off for the rest of the run; the training goes on"
_MARKED = CycleKey("marked by hand", 1)  # the cycle of a schedule that the patches do not know
_NOT_KNOWN = 1 << 62  # passes


class Listener(Protocol):
    """What hears of one rank's bubbles.  All times are CLOCK_MONOTONIC nanoseconds."""

    @property
    def watching(self) -> bool:
        """Whether it wants to hear what is in the iteration that has begun; asked once in each."""

    def iteration_started(self, iteration: int, now_ns: int) -> None:
        """A training iteration has begun."""

    def iteration_ended(self, now_ns: int) -> None:
        """It has ended, whole."""

    def cycle_started(self, key: CycleKey, now_ns: int) -> None:
        """A schedule begins: the bubbles that follow are numbered from 0 again."""

    def cycle_ended(self) -> None:
        """The bubbles of that schedule are all known."""

    def bubble_opened(self, kind: BubbleKind, index: int, now_ns: int, free_bytes: int | None = None) -> None:
        """The rank is about to wait.

        Args:
            free_bytes: the device memory that is promised to be free meanwhile; None for what is found to be free.
        """

    def bubble_closed(self, now_ns: int) -> None:
        """The wait is over."""

    def computed(self, name: str, start_ns: int, end_ns: int) -> None:
        """A ``forward`` or ``backward`` of one microbatch ran."""

    def disturbed(self, reason: str) -> None:
        """Something outside the cycle ran (evaluation, a checkpoint): the next cycle may differ from the others."""

    def shut(self) -> None:
        """It is taken off after a failure: no bubble may open any more."""


class OwnWork(Protocol):
    """Work of the training itself that a rank can do while it waits."""

    def cycle_started(self) -> None:
        """A schedule of a training iteration begins: the waits that follow are numbered from 0 again."""

    def beside[T](self, call: Callable[[], T]) -> Callable[[], T]:
        """Work while a call waits, until it has ended or there is nothing to do.

        Returns:
            What gives the call's result, as soon as it has ended.
        """


class _InPass:
    """Held while a pass runs; one may run inside another."""

    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_exc: object) -> None:
        self.depth -= 1


class BubbleBus:
    """Follows one rank through its schedule.

    Attributes:
        on_iteration, on_last_backward: patches that have to do something at that moment; not guarded.
        own_work: comes before jobs in every wait of a training iteration; not guarded, since the training needs it.
        in_pass: held by the patches while a forward or backward pass runs.
    """

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.on_iteration: Callable[[], None] | None = None
        self.on_last_backward: Callable[[], None] | None = None
        self.own_work: OwnWork | None = None
        self.clock: Callable[[], int] = time.monotonic_ns
        self.in_pass = _InPass()
        self._training = False
        self._watching = True  # the listener wants to hear what is in this iteration
        self._in_cycle = False
        self._thread = 0  # of the schedule
        self._waits = False
        self._forward_only = False
        self._index = 0
        self._forwards = 0
        self._backwards = 0
        self._passes = 0
        self._open = False
        self._marked = False  # the open one, by hand

    # The patches call what follows in the order in which it happens.

    def begin_iteration(self, iteration: int) -> None:
        if self.on_iteration is not None:
            self.on_iteration()
        self._training = True
        if self.listener is not None:
            self._guarded(self._start, self.listener, iteration)

    def _start(self, listener: Listener, iteration: int) -> None:
        listener.iteration_started(iteration, self.clock())
        self._watching = listener.watching

    def end_iteration(self) -> None:
        self._end_cycle()
        self._training, self._watching = False, True
        if self.listener is not None:
            self._guarded(self.listener.iteration_ended, self.clock())

    def begin_schedule(self, key: CycleKey) -> None:
        """A schedule of ``key.microbatches`` forwards (and backwards) per model chunk begins."""
        self._end_cycle()
        self._in_cycle = True
        self._thread = get_ident()
        self._forward_only = key.forward_only
        self._index = self._forwards = self._backwards = 0
        self._passes = key.microbatches * key.chunks
        if self.own_work is not None and self._training:
            self.own_work.cycle_started()
        if (listener := self._heard) is not None:
            self._guarded(listener.cycle_started, key, self.clock())

    def end_schedule(self) -> None:
        """The schedule is over.  A training iteration's cycle goes on until the iteration's end, with the drain."""
        if not self._training:
            self._end_cycle()

    def open(self, *, for_backward: bool = False) -> None:
        """The rank is about to wait for another stage (``for_backward``: for an output gradient).

        A second call before ``close`` goes on with the same bubble.
        """
        if self._in_cycle:
            self._waits = True
            self._begin(self._kind(for_backward), None)

    def wait[T](self, call: Callable[[], T], *, for_backward: bool = False) -> T:
        """Call what waits for another stage.  The rank's own work comes first; what it leaves of the wait is a bubble.

        The bubble goes on until ``close``, or the next wait.
        """
        if self.own_work is not None and self._in_cycle and self._training:
            call = self.own_work.beside(call)
        self.open(for_backward=for_backward)
        return call()

    def blocked[T](self, call: Callable[[], T]) -> T:
        """Call what waits for another stage: a bubble of its own, unless it is part of a wait that is known."""
        if self._waits:
            return call()
        try:
            return self.wait(call)
        finally:
            self.close()

    def close(self) -> None:
        """The wait is over; a bubble that is marked goes on."""
        self._waits = False
        if not self._marked:
            self._end()

    @contextmanager
    def mark(self, kind: BubbleKind, free_bytes: int | None) -> Iterator[None]:
        """A bubble for as long as the block takes; inside another bubble, that one goes on."""
        if self._training and not self._in_cycle:
            self.begin_schedule(_MARKED)
            self._passes = _NOT_KNOWN  # so the author marks the drain, too
        begun = self._in_cycle and self._begin(kind, free_bytes)
        self._marked |= begun
        try:
            yield
        finally:
            if begun:
                self._marked = False
                self._end()

    def _begin(self, kind: BubbleKind, free_bytes: int | None) -> bool:
        """Open a bubble; False if one is open, or nobody listens."""
        listener = self._heard
        if self._open or listener is None:
            return False
        self._open = True
        self._guarded(listener.bubble_opened, kind, self._index, self.clock(), free_bytes)
        return True

    def _end(self) -> None:
        now_ns = self.clock()
        if self._open:
            self._open = False
            self._index += 1
            if (listener := self._heard) is not None:
                self._guarded(listener.bubble_closed, now_ns)

    def forward(self, start_ns: int) -> None:
        """A forward pass that began at ``start_ns`` has ended."""
        self._forwards += 1
        if self._in_cycle and (listener := self._heard) is not None:
            self._guarded(listener.computed, "forward", start_ns, self.clock())

    def backward(self, start_ns: int) -> None:
        """A backward pass that began at ``start_ns`` has ended."""
        self._backwards += 1
        if self._backwards == self._passes and self._training and self.on_last_backward is not None:
            self.on_last_backward()
        if self._in_cycle and (listener := self._heard) is not None:
            self._guarded(listener.computed, "backward", start_ns, self.clock())

    def disturb(self, reason: str) -> None:
        if self.listener is not None:
            self._guarded(self.listener.disturbed, reason)

    @property
    def in_drain(self) -> bool:
        """Whether the last backward is done and the iteration is not: where a collective's wait is a drain bubble."""
        return self._in_cycle and self._training and self._backwards >= self._passes

    @property
    def between_passes(self) -> bool:
        """Whether a schedule that the patches know is run by this thread, or its drain, and no pass at this moment."""
        return self._in_cycle and not self.in_pass.depth and self._passes < _NOT_KNOWN and self._thread == get_ident()

    def _kind(self, for_backward: bool) -> BubbleKind:
        if self._forwards == 0:
            return BubbleKind.FILL
        if (self._forwards if self._forward_only else self._backwards) >= self._passes:
            return BubbleKind.DRAIN
        if for_backward and self._backwards == 0:
            return BubbleKind.FWD_BWD
        return BubbleKind.INTERIOR

    @property
    def _heard(self) -> Listener | None:
        """Who hears of the bubbles and passes of this iteration."""
        return self.listener if self._watching else None

    def _end_cycle(self) -> None:
        if self._in_cycle:
            self._in_cycle = False
            if (listener := self._heard) is not None:
                self._guarded(listener.cycle_ended)

    def _guarded(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception:
            logger.exception(_OFF)
            listener, self.listener = self.listener, None
            try:
                if listener is not None:
                    listener.shut()
            except Exception:
                logger.exception("the gate could not be shut")


bus = BubbleBus()


@contextmanager
def bubble(kind: BubbleKind | str, *, free_bytes: int | None = None) -> Iterator[None]:
    """Mark a bubble by hand, in a schedule of one's own: PipeFill's bubble instruction (arXiv 2410.07192).

    The device must be idle for as long as the block takes.  It should last about as long in every iteration, and come
    at the same place among the iteration's bubbles: so it is predicted.  Outside of training iterations, and where
    nobody listens, nothing happens.

        with megatron.fill.bubble("interior", free_bytes=4 << 30):
            request.wait()

    Args:
        kind: a ``BubbleKind``, or its name.
        free_bytes: how much device memory is free meanwhile, which is what jobs may then count on: the promise is not
            checked; None for what is found to be free.

    Raises:
        ValueError: there is no such kind, or ``free_bytes`` is negative.
    """
    if kind not in [*BubbleKind]:
        raise ValueError(f"there is no bubble of kind {kind!r}; expected one of {', '.join(BubbleKind)}")
    if free_bytes is not None and free_bytes < 0:
        raise ValueError(f"free_bytes is {free_bytes}: expected 0 or more bytes")
    with bus.mark(BubbleKind(kind), free_bytes):
        yield
