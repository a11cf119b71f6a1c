"""Pacing: work of unknown duration on a device that does not preempt is held outside bubbles.

On the CPU the idle scheduling class protects the training from a task's work outside bubbles.  A GPU has no such class:
work that is launched there competes with the training on equal terms.  So ``init``, a change of configuration, a copy
of the state, and steps of unknown duration begin in one of the longest bubbles, are held when it ends, and resume when
the next one opens.

They are held between two bytecodes of the worker's main thread, by a timer's signal.  A single call that takes longer
than the rest of the bubble (creating a CUDA context, waiting for a long kernel) runs on after its end, and so does work
that was launched and not waited for.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from megatron.fill.pages.baton import Baton
from megatron.fill.pages.control import AlwaysRunning, RunSwitch
from megatron.fill.pages.gate import GateReader, OpenBubble
from megatron.fill.pages.steplog import StepLog, WorkerPhase

logger = logging.getLogger("pipefill.pacing")

_TICK_S = 0.001  # between two checks whether the bubble is over
_LOOK = 16  # number of bubbles to see before one can be called long
_WINDOW = 64  # number of recent bubbles that count for that
_LONG, _LONG_ENOUGH = 0.8, 0.4  # shares of the longest bubble; the second one applies after ``_PATIENCE`` bubbles
_PATIENCE = 48  # number of bubbles to wait for a long one; after twice as many, any bubble is taken
_NEVER_NS = 1 << 62
_LATE_NS = 5_000_000  # time after the end of a bubble from which a warning is given


@dataclass(frozen=True, slots=True)
class StepDevice:
    """The device as a step uses it."""

    launch: Callable[[], None] = lambda: None  # called before every step, and when the device is taken
    # Waits until the device has done all work that was launched; a step ends then.
    synchronize: Callable[[], None] = lambda: None
    # Undoes ``launch``; called after every step, once the time of its end is known.
    land: Callable[[], None] = lambda: None
    # The training takes the device back at the end of a bubble, so the duration of a step or pause that the end
    # interrupts is not a measurement.
    preemptive: bool = False


PLAIN = StepDevice()


@dataclass(frozen=True, slots=True)
class StepPages:
    """The pages in shared memory that a task's steps depend on."""

    gate: GateReader  # the gate as this job's seat sees it; in the tail seat, the rest of each bubble
    log: StepLog
    baton: Baton | None = None  # used by the resident job to pass a bubble on; None in the tail seat
    control: RunSwitch = field(default_factory=AlwaysRunning)  # read before every step


class Stopped(BaseException):
    """The worker was asked to stop while its task waited for a bubble; a BaseException, so that no task catches it."""


@dataclass(slots=True)
class Turn:
    """A use of the device, from its first bubble to its last."""

    held_ns: int = 0  # total time that it was held between bubbles
    first_held_ns: int = 0  # time when it was first held; 0 if never
    late_ns: int = 0  # longest time that it ran on after the end of a bubble
    bubbles: int = 1  # number of bubbles that it ran in


type TakesTurn = Callable[..., contextlib.AbstractContextManager[Turn]]  # ``Pacer.turn`` or ``at_once``


@contextlib.contextmanager
def at_once(what: str, must: bool = False) -> Iterator[Turn]:
    """Use a device that preempts for the training, without waiting for a bubble."""
    yield Turn()


@dataclass(eq=False, repr=False)
class Pacer:
    """Lets one worker's task use its device in bubbles only; for the main thread.

    The baton is held from the first turn on, and passed on in each bubble that a turn no longer uses.
    """

    pages: StepPages
    stopping: Callable[[], bool]  # returns True once the worker was asked to stop
    device: StepDevice = PLAIN
    clock: Callable[[], int] = time.monotonic_ns

    def __post_init__(self) -> None:
        pages = self.pages
        self._gate, self._log, self._control, self._baton = pages.gate, pages.log, pages.control, pages.baton
        self._lengths_ns: deque[int] = deque(maxlen=_WINDOW)
        self._seq = 0  # the latest bubble seen
        self._bubble = OpenBubble(0, 0, 0, 0)  # the one that a turn is in
        self._ends_ns = 0
        self._turn = Turn()
        self._taken = self._must = self._rings = False

    def see(self, bubble: OpenBubble) -> None:
        """Record the length of a bubble."""
        if bubble.seq > self._seq:
            self._seq = bubble.seq
            if not bubble.alone:
                self._lengths_ns.append(bubble.deadline_ns - bubble.opened_ns)

    def is_long(self, bubble: OpenBubble, now_ns: int, share: float = _LONG) -> bool:
        """True if the predicted rest of the bubble is at least this share of the longest recent bubble."""
        if bubble.alone:
            return True
        longest_ns = max(self._lengths_ns) if len(self._lengths_ns) >= _LOOK else 0
        return longest_ns > 0 and bubble.deadline_ns - now_ns >= share * longest_ns

    @contextlib.contextmanager
    def turn(self, what: str, must: bool = False) -> Iterator[Turn]:
        """Wait for a long bubble, and use the device in the block; once the training is over, without waiting.

        Args:
            what: name of the work, for the log.
            must: the work has to be done: proceed at once when the worker is asked to stop.

        Raises:
            Stopped: the worker was asked to stop, and ``must`` is False.
        """
        self._must = must
        if self._baton is not None:
            self._baton.hold()
        began_ns = self.clock()
        offers = count()

        def takes(bubble: OpenBubble, now_ns: int) -> bool:
            offered = next(offers)
            if offered == 2 * _PATIENCE:
                logger.warning("%s: of none of %d bubbles was it known that it lasts: any one will do", what, offered)
            long = self.is_long(bubble, now_ns, _LONG if offered < _PATIENCE else _LONG_ENOUGH)
            return long or offered >= 2 * _PATIENCE

        bubble = self._next(takes)
        waited_ns = self.clock() - began_ns
        if bubble is None:
            yield Turn()
            self.device.synchronize()
            return
        self.device.launch()
        try:
            with self.paced(bubble, must) as turn:
                yield turn
                self.device.synchronize()
        finally:
            if self._taken:
                self._give_back()
        took_ns = self.clock() - began_ns - waited_ns
        logger.info(
            "%s waited %.0f ms for a long bubble, then took %.0f ms, %.0f of them between bubbles, in %d bubbles",
            *(what, waited_ns / 1e6, took_ns / 1e6, turn.held_ns / 1e6, turn.bubbles),
        )
        if turn.late_ns > _LATE_NS:
            logger.warning(
                "%s went on for %.0f ms after the end of a bubble, beside the main job: one call of it takes longer "
                "than what is left of a bubble; the longest ones are of %.0f ms",
                *(what, turn.late_ns / 1e6, max(self._lengths_ns, default=0) / 1e6),
            )

    @contextlib.contextmanager
    def paced(self, bubble: OpenBubble, must: bool = True) -> Iterator[Turn]:
        """Run the block, which begins in this bubble; the caller takes the device before and gives it back after.

        With ``must``, it goes on at once when the worker is asked to stop: half a step could not be saved.
        """
        self._must = must
        self._enter(bubble)
        self._turn, self._taken, self._rings = Turn(), True, True
        before = signal.signal(signal.SIGALRM, self._tick)
        signal.siginterrupt(signal.SIGALRM, False)
        theirs = signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
        try:
            yield self._turn
        finally:
            self._rings = False  # first, since a signal may be pending
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, *theirs)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Give the device back in the block, which does not use it and is not held; outside turns, do nothing."""
        if not self._rings or self._log.step_seq:
            yield
            return
        self._rings = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.device.synchronize()
        self._give_back()
        since_ns = self.clock()
        try:
            yield
        finally:
            self._go_on(since_ns)

    def _tick(self, number: int, frame: object) -> None:
        """Hold the task here if its bubble is over."""
        if not self._rings:
            return
        self._rings = False  # the next signal may come while this one is handled
        bubble, log = self._bubble, self._log
        now_ns = self.clock()
        if self._gate.is_open(bubble.seq) and now_ns < self._ends_ns and self._control.running:
            self._rings = True
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._turn.first_held_ns = self._turn.first_held_ns or now_ns
        self._give_back()
        in_step = bool(log.step_seq)
        log.step_seq = 0  # a step that is held is not overdue
        self._go_on(now_ns)
        if in_step and self._rings:
            log.step_seq = self._bubble.seq

    def _go_on(self, since_ns: int) -> None:
        """Wait for the next bubble, and resume in it; the turn has been held since ``since_ns``."""
        self._rings = False
        offers = count()
        following = self._next(lambda bubble, now_ns: bubble.deadline_ns > now_ns or next(offers) >= _LOOK)
        self._turn.held_ns += self.clock() - since_ns
        self.device.launch()
        self._taken = True
        if following is not None:
            self._enter(following)
            self._rings = True
            self._turn.bubbles += 1
            signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)

    def _enter(self, bubble: OpenBubble) -> None:
        """Run in this bubble until its predicted end; if that has passed, until its actual end."""
        self._bubble = bubble
        self._ends_ns = bubble.deadline_ns if self.clock() < bubble.deadline_ns else _NEVER_NS

    def _give_back(self) -> None:
        closed_ns = self._gate.closed_ns(self._bubble.seq)
        if closed_ns is not None:
            self._turn.late_ns = max(self._turn.late_ns, self.clock() - closed_ns)
        self._taken = False
        self.device.land()
        if self._baton is not None:
            self._baton.pass_on(self._bubble.seq)

    def _next(self, takes: Callable[[OpenBubble, int], bool]) -> OpenBubble | None:
        """Wait for a bubble that ``takes`` accepts; None if the training is over, or a stop ends the wait."""
        phase, self._log.phase = self._log.phase, WorkerPhase.ASLEEP
        try:
            while not self._gate.ended:
                if self.stopping():
                    if self._must:
                        return None
                    raise Stopped
                bubble = self._gate.wait(self._seq)
                if bubble is None:
                    continue
                self.see(bubble)
                if self._control.running and takes(bubble, self.clock()):
                    return bubble
                if self._baton is not None:
                    self._baton.pass_on(bubble.seq)
            return None
        finally:
            self._log.phase = phase
