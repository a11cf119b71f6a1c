"""The bubble bus, between the patched Megatron and the listener.

The patches report plain facts (a schedule began, a forward ran, the rank is about to wait); the bus turns them into
bubbles with a kind and a position in the cycle, and passes these to one listener.  A listener that raises is removed,
and the training continues: nothing behind the bus may harm it.  The author of a schedule can mark bubbles by hand
(``bubble``).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident
from typing import Protocol

from megatron.fill.account import EVALUATION, EVALUATION_WAIT, Account
from megatron.fill.types import PIPELINE_KINDS, BubbleKind, CycleKey

logger = logging.getLogger(__name__)

_MARKED = CycleKey("marked by hand", 1)  # the cycle of a schedule that the patches do not know
_NOT_KNOWN = 1 << 62  # number of passes of a schedule that the patches do not know: never reached


class Listener(Protocol):
    """Observer of one rank's bubbles.  All times are CLOCK_MONOTONIC nanoseconds."""

    @property
    def watching(self) -> bool:
        """True to be notified of the events inside the iteration that has begun; read once in each iteration."""

    def iteration_started(self, iteration: int, now_ns: int) -> None:
        """Called when a training iteration has begun."""

    def iteration_ended(self, now_ns: int) -> None:
        """Called when the iteration has ended, completely."""

    def cycle_started(self, key: CycleKey, now_ns: int) -> None:
        """Called when a schedule begins: the bubbles that follow are numbered from 0 again."""

    def bubble_opened(self, kind: BubbleKind, index: int, now_ns: int, free_bytes: int | None = None) -> None:
        """Called when the rank is about to wait, with ``free_bytes`` promised to be free, None for those found.

        Bubbles of the pipeline are numbered through the cycle, those of another kind through the save, the iteration
        or the evaluation's schedule.
        """

    def bubble_closed(self, now_ns: int) -> None:
        """Called when the wait is over."""

    def computed(self, name: str, start_ns: int, end_ns: int) -> None:
        """Called when a ``forward`` or ``backward`` of one microbatch has run."""

    def disturbed(self, reason: str) -> None:
        """Called when something outside the cycle ran (an evaluation, a checkpoint, the capture of a CUDA graph), also
        within an iteration: the next cycle may differ."""

    def shut(self) -> None:
        """Called when the listener is removed after a failure: no bubble may open any more."""


class Callback:
    """A part of the training that acts at moments of its iterations, before the listener.

    Its errors are not caught, since the training needs it.
    """

    def on_iteration(self) -> None:
        """Called when an iteration begins."""

    def on_schedule(self) -> None:
        """Called when a schedule of an iteration begins."""

    def on_wait[T](self, call: Callable[[], T]) -> Callable[[], T]:
        """Called before a wait for another stage, of a schedule of an iteration.

        Returns:
            The function to call in the place of ``call``, with the same result; a bubble is open meanwhile.
        """
        return call

    def on_last_backward(self) -> None:
        """Called when an iteration's last backward pass has ended."""


class BubbleBus:
    """Follows one rank through its schedule."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.callbacks: list[Callback] = []  # parts of the training itself, called in this order
        self.clock: Callable[[], int] = time.monotonic_ns
        self.in_pass = 0  # number of passes that run, one inside another; counted by the patches
        self.account = Account()  # of the rank's time, by what it went to
        self.waited = False  # a wait for another stage has been seen
        self._depth = 0  # of the present wait in the account
        self._training = False
        self._watching = True  # the listener is notified of the events inside this iteration
        self._in_cycle = False
        self._thread = 0  # thread that runs the schedule
        self._waits = False
        self._forward_only = False
        self._index = 0
        self._forwards = 0
        self._backwards = 0
        self._passes = 0
        self._open = False
        self._marked = False  # the open bubble is marked by hand
        self._saving = False
        # Waits outside the pipeline so far: in this save, in this iteration, or in this schedule of an evaluation.
        self._outside_waits = {BubbleKind.SAVE: 0, BubbleKind.GROUP: 0, BubbleKind.DATA: 0}

    # The patches call the methods below in the order of the events.

    def begin_iteration(self, iteration: int) -> None:
        for callback in self.callbacks:
            callback.on_iteration()
        self.account.settle()
        self._training = True
        self._outside_waits[BubbleKind.DATA] = self._outside_waits[BubbleKind.GROUP] = 0
        if self.listener is not None:
            self._guarded(self._start, self.listener, iteration)

    def _start(self, listener: Listener, iteration: int) -> None:
        listener.iteration_started(iteration, self.clock())
        self._watching = listener.watching

    def end_iteration(self) -> None:
        self._in_cycle = self._training = False
        self._watching = True
        if self.listener is not None:
            self._guarded(self.listener.iteration_ended, self.clock())

    def begin_schedule(self, key: CycleKey) -> None:
        """Begin a schedule of ``key.microbatches`` forwards (and backwards) per model chunk.

        A training iteration may have forwards only (``--freeze-all-layers``), but is no evaluation to the listener.
        """
        self._in_cycle = True
        self._thread = get_ident()
        self._forward_only = key.forward_only
        self._index = self._forwards = self._backwards = 0
        self._passes = key.microbatches * key.chunks
        if not self._training:
            self._outside_waits[BubbleKind.DATA] = 0
        else:
            key = replace(key, forward_only=False)
            for callback in self.callbacks:
                callback.on_schedule()
        if (listener := self._heard) is not None:
            self._guarded(listener.cycle_started, key, self.clock())

    def end_schedule(self) -> None:
        """End the schedule.  A training iteration's cycle continues to the iteration's end, with the drain."""
        self._in_cycle = self._in_cycle and self._training

    def open(self, *, for_backward: bool = False) -> None:
        """Open a bubble: the rank is about to wait for another stage (``for_backward``: for an output gradient).

        A second call before ``close`` continues the same bubble.
        """
        if self._in_cycle:
            kind = self._kind(for_backward)
            if not self._waits:
                self._waits = self.waited = True
                self._depth = self.account.enter(kind if self._training else EVALUATION_WAIT)
            self._begin(kind, self._index, None)

    def wait[T](self, call: Callable[[], T], *, for_backward: bool = False) -> T:
        """Make a call that waits for another stage, after the callbacks: a bubble, until ``close`` or the next wait."""
        if self._in_cycle and self._training:
            for callback in self.callbacks:
                call = callback.on_wait(call)
        self.open(for_backward=for_backward)
        return call()

    def blocked[T](self, call: Callable[[], T]) -> T:
        """Make a call that waits for another stage, in its own bubble unless it is part of a wait reported before."""
        if self._waits:
            return call()
        try:
            return self.wait(call)
        finally:
            self.close()

    def close(self) -> None:
        """End the wait and its bubble, unless the bubble is marked by hand."""
        if self._waits:
            self._waits = False
            self.account.leave(self._depth)
        if not self._marked:
            self._end()

    @contextmanager
    def mark(self, kind: BubbleKind, free_bytes: int | None) -> Iterator[None]:
        """Open a bubble for the duration of the block; inside another bubble, that one continues."""
        if self._training and not self._in_cycle:
            self.begin_schedule(_MARKED)
            self._passes = _NOT_KNOWN  # hence the author has to mark the drain, too
        begun = self._in_cycle and self._begin(kind, self._index, free_bytes)
        self._marked |= begun
        self.waited |= self._in_cycle
        try:
            with self.account.within(kind):
                yield
        finally:
            if begun:
                self._marked = False
                self._end()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save a checkpoint in the block."""
        self._saving, self._outside_waits[BubbleKind.SAVE] = not self._training, 0
        try:
            yield
        finally:
            self._saving = False

    def wait_in_save[T](self, call: Callable[[], T]) -> T:
        """Make a call that waits for other ranks, or for storage: in a save, in a bubble."""
        return self._outside(BubbleKind.SAVE, call) if self._saving else call()

    def wait_for_group[T](self, call: Callable[[], T], name: str) -> T:
        """Make a call that waits in a group of this name: in a save, or between passes, in a bubble."""
        account = self.account
        if account.thread != get_ident():
            return call()
        depth = account.enter(name)
        try:
            if not self._training or self.in_pass:
                return self.wait_in_save(call)
            return self._outside(BubbleKind.GROUP, call)
        finally:
            account.leave(depth)

    def wait_for_batch[T](self, call: Callable[[], T]) -> T:
        """Make a call that waits for the next batch: in an iteration or an evaluation's schedule, in a bubble."""
        return self._outside(BubbleKind.DATA, call) if self._training or self._in_cycle else call()

    def _outside[T](self, kind: BubbleKind, call: Callable[[], T]) -> T:
        """Make a call in a bubble outside the pipeline, at the next place of its kind; it is no part of the cycle.

        What another thread waits for is no bubble of the rank, and has no place.
        """
        if self.account.thread != get_ident():
            return call()
        index = self._outside_waits[kind]
        self._outside_waits[kind] = index + 1
        if not self._begin(kind, index, None):
            return call()
        try:
            return call()
        finally:
            self._end(in_cycle=False)

    def _begin(self, kind: BubbleKind, index: int, free_bytes: int | None) -> bool:
        """Open a bubble; False if one is open already, or there is no listener."""
        listener = self._heard
        if self._open or listener is None:
            return False
        self._open = True
        self._guarded(listener.bubble_opened, kind, index, self.clock(), free_bytes)
        return True

    def _end(self, *, in_cycle: bool = True) -> None:
        now_ns = self.clock()
        if self._open:
            self._open = False
            self._index += in_cycle
            if (listener := self._heard) is not None:
                self._guarded(listener.bubble_closed, now_ns)

    def forward(self, start_ns: int) -> None:
        """Report the end of a forward pass that began at ``start_ns``."""
        self._forwards += 1
        if self._in_cycle and (listener := self._heard) is not None:
            self._guarded(listener.computed, "forward", start_ns, self.clock())

    def backward(self, start_ns: int) -> None:
        """Report the end of a backward pass that began at ``start_ns``."""
        self._backwards += 1
        if self._backwards == self._passes and self._training:
            for callback in self.callbacks:
                callback.on_last_backward()
        if self._in_cycle and (listener := self._heard) is not None:
            self._guarded(listener.computed, "backward", start_ns, self.clock())

    def disturb(self, reason: str) -> None:
        if self.listener is not None:
            self._guarded(self.listener.disturbed, reason)

    def computing(self, name: str) -> str:
        """Return the name in the account of a pass that begins now.

        A forward outside of iterations is an evaluation's also where there are no schedules, with one stage.
        """
        return EVALUATION if not self._training and (self._in_cycle or name == "forward") else name

    @property
    def in_drain(self) -> bool:
        """True between the last pass and the iteration's end, where a collective's wait is a drain bubble."""
        return self._in_cycle and self._training and self._passed

    @property
    def between_passes(self) -> bool:
        """True if this thread is in a known schedule, or in its drain, and outside of passes at this moment."""
        return self._in_cycle and not self.in_pass and self._passes < _NOT_KNOWN and self._thread == get_ident()

    def _kind(self, for_backward: bool) -> BubbleKind:
        if self._forwards == 0:
            return BubbleKind.FILL
        if self._passed:
            return BubbleKind.DRAIN
        if for_backward and self._backwards == 0:
            return BubbleKind.FWD_BWD
        return BubbleKind.INTERIOR

    @property
    def _passed(self) -> bool:
        """True if the schedule's last pass has ended."""
        return (self._forwards if self._forward_only else self._backwards) >= self._passes

    @property
    def _heard(self) -> Listener | None:
        """The listener, or None if it does not watch this iteration."""
        return self.listener if self._watching else None

    def forget(self) -> None:
        """Report nothing any more: in a forked child, whose bubbles are not the rank's."""
        self.listener = None

    def _guarded(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception:
            logger.exception("PipeFill failed and is switched off for the rest of the run; the training goes on")
            listener, self.listener = self.listener, None
            try:
                if listener is not None:
                    listener.shut()
            except Exception:
                logger.exception("the gate could not be shut")


bus = BubbleBus()
os.register_at_fork(after_in_child=bus.forget)  # a save may fork writers, which inherit the gate's page


@contextmanager
def bubble(kind: BubbleKind | str, *, free_bytes: int | None = None) -> Iterator[None]:
    """Mark a bubble by hand, in a custom schedule: PipeFill's bubble instruction (arXiv 2410.07192).

    The device must be idle for the duration of the block.  To be predicted, the bubble should last about as long in
    every iteration, and come at the same position among the iteration's bubbles.  It has no effect outside of training
    iterations and without a listener.

        with megatron.fill.bubble("interior", free_bytes=4 << 30):
            request.wait()

    Args:
        kind: a ``BubbleKind`` of the pipeline, or its name.
        free_bytes: device memory that is free during the bubble and that jobs may use; the promise is not checked.
            None for the free memory found.

    Raises:
        ValueError: the kind does not exist, or ``free_bytes`` is negative.
    """
    if kind not in PIPELINE_KINDS:
        raise ValueError(f"there is no bubble of kind {kind!r}; expected one of {', '.join(PIPELINE_KINDS)}")
    if free_bytes is not None and free_bytes < 0:
        raise ValueError(f"free_bytes is {free_bytes}: expected 0 or more bytes")
    with bus.mark(BubbleKind(kind), free_bytes):
        yield
