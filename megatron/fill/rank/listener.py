"""The rank's listener: predicts each bubble, opens and shuts the gate, and keeps the records.

It is the only part of PipeFill that runs inside the training process while it trains: a few microseconds per bubble.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from statistics import median
from threading import Event

from megatron.fill.pages.board import CycleBoard
from megatron.fill.pages.control import AlwaysRunning, RunSwitch
from megatron.fill.pages.gate import GateWriter
from megatron.fill.profiles import BubbleCycle, BubbleSlot
from megatron.fill.rank.blocks import Blocks
from megatron.fill.rank.brake import Brake
from megatron.fill.rank.outside import OutsidePredictor
from megatron.fill.rank.predictor import ENOUGH_TO_PLAN, BubblePredictor
from megatron.fill.rank.recorder import Recorder
from megatron.fill.types import PIPELINE_KINDS, Bubble, BubbleKind, CycleKey, Iteration, fills_block

_SHOW_EVERY = 20  # iterations between two updates of the board
# A wait outside the pipeline that is shorter, or in which the rank was busy, is not recorded unless it was filled.
_LEAST_OUTSIDE_NS = 1_000_000
_FREED_BYTES = 64 << 20  # increase in free memory after which the board is updated at once


@dataclass(eq=False, repr=False)
class RankListener:
    """A hooks.Listener that fills one rank's bubbles, once the predictor is warm."""

    gate: GateWriter | None  # the rank's gate; None to measure only
    recorder: Recorder
    predictor: BubblePredictor
    free_bytes: Callable[[], int]  # returns the device memory that the training leaves free now
    _: KW_ONLY
    # Length of the alternating blocks with and without filling, in iterations; 0 for always on.  While jobs settle
    # (``Blocks``), every iteration is filled.
    paired_blocks: int = 0
    board: CycleBoard | None = None  # page for the bubble cycle, updated after a few iterations and then every 20
    brake: Brake | None = None  # stops the filling while it slows the training down
    # While it is not running, no bubble is opened or counts as fillable.
    control: RunSwitch = field(default_factory=AlwaysRunning)

    def __post_init__(self) -> None:
        rule = self.predictor.rule
        self._outside = OutsidePredictor(rule.min_bubble_ns)
        self.guard_ns = rule.guard_ns  # replaced by the brake's if there is a brake
        self.filling = False  # this iteration is filled, unless paused
        self.watching = True  # this iteration's bubbles are recorded
        self.over = Event()  # set at the end
        if self.brake is not None:
            self.recorder.brakes = self.brake.events
        self._recent_ns: deque[int] = deque(maxlen=ENOUGH_TO_PLAN)  # durations of the latest iterations
        self._free_bytes: dict[int, int] = {}  # free memory in each bubble of this iteration
        self._least_bytes: dict[int, int] = {}  # least free memory in each bubble since the latest update of the board
        self._known_bytes: dict[int, int] = {}  # the same of the latest update in which each bubble was there
        self._shown_bytes = 0  # least free memory of any bubble on the board
        self._show_at = self._first_show = min(ENOUGH_TO_PLAN, rule.warmup)
        self.iteration = 0
        self.moved_ns = 0  # time at which an iteration last ended, or a schedule last began
        self._iteration_start_ns = 0
        self._iterations_seen = 0
        self._evaluated = 0  # number of schedules of evaluations before the first iteration
        self._blocks = Blocks(rule.warmup, self.paired_blocks, lambda: self.control.settled)
        self._last_settling = 0  # the latest iteration after the warm-up in which jobs were not settled
        self._forward_only = False
        self._disturbed: frozenset[str] = frozenset()  # what ran since the last training cycle began
        self._counts = False  # this iteration is past the warm-up and could be filled
        self._odd = False  # it was disturbed, so its time is not comparable
        self._paused = False  # filling was paused at some time in it
        self._bubble: Bubble | None = None  # the open one
        self._promised_bytes: int | None = None  # free memory that the schedule promises in it

    def iteration_started(self, iteration: int, now_ns: int, watched: bool | None = None) -> None:
        """Begin an iteration; ``watched``: its bubbles will be reported, None if this listener decides."""
        self.iteration = iteration
        self._forward_only = False
        self._iteration_start_ns = now_ns
        if self._evaluated:
            self._evaluated, self._show_at = 0, self._first_show
            self._recent_ns.clear()
        self._iterations_seen += 1
        begun = self._blocks.begun
        self._blocks.iteration_started()
        if self._blocks.begun and not begun:
            if self._last_settling:
                self.recorder.settled_after = self._last_settling
            if self.brake is not None:
                self.brake.jobs_settled()
        if not self._blocks.begun and self._blocks.past_warmup >= 0:
            self._last_settling = iteration
        self.watching = self._blocks.watched if watched is None else watched
        if not self.watching:
            self.predictor.iteration_skipped()
        self._counts = self.gate is not None and self._blocks.past_warmup >= 0
        self.filling = self._counts and self._on(iteration)
        self._odd = bool(self._disturbed)
        self._paused = not self.control.running
        self.recorder.iteration_started()

    def _on(self, iteration: int) -> bool:
        blocks = self._blocks
        if blocks.settling:
            return True
        if self.brake is not None:
            on = self.brake.iteration_started(iteration, blocks.past_warmup)
            self.guard_ns = self.brake.guard_ns
            if self.gate is not None:
                self.gate.brake(self.brake.on)
            if self.brake.events:
                self.predictor.overrun = 0.0
            return on
        return not self.paired_blocks or fills_block(blocks.number)

    def iteration_ended(self, now_ns: int) -> None:
        start_ns, paused = self._iteration_start_ns, self._paused
        # An iteration with a pause belongs to neither side of a comparison.
        block = -1 if paused else self._blocks.number
        self.moved_ns = now_ns
        self._recent_ns.append(now_ns - start_ns)
        if self.brake is not None and self._counts and not self._blocks.settling:
            self.brake.observe(now_ns - start_ns, self._odd or paused)
        if self.board is not None:
            self._look(self.board)
        filled = self.filling and not paused
        self.recorder.iteration_ended(Iteration(self.iteration, start_ns, now_ns, filled, block, self.watching))

    def _look(self, board: CycleBoard) -> None:
        """Update the board if that is due, or if a job has given memory back."""
        now, least = self._free_bytes, self._least_bytes
        if self._shown_bytes and min(now.values(), default=0) >= self._shown_bytes + _FREED_BYTES:
            least.clear()
            self._show_at = 0
        for index, free_bytes in now.items():
            least[index] = min(free_bytes, least.get(index, free_bytes))
        now.clear()
        if (self._iterations_seen or self._evaluated) >= self._show_at:
            self._show(board)

    def _show(self, board: CycleBoard) -> None:
        expected = self.predictor.expected()
        if not expected:  # the predictor is not warm: try again after the next iteration
            return
        self._show_at = (self._iterations_seen or self._evaluated) + _SHOW_EVERY
        least_ns = self.predictor.rule.min_bubble_ns
        self._known_bytes |= self._least_bytes  # some bubbles are in half of the iterations only
        slots = [
            # A bubble that is not filled keeps its position, with a duration of 0.
            BubbleSlot(kind, duration_ns if duration_ns >= least_ns else 0, self._known_bytes.get(index, 0))
            for index, (kind, duration_ns) in enumerate(expected)
        ]
        board.show(BubbleCycle(int(median(self._recent_ns)), tuple(slots)))
        self._shown_bytes = min(self._least_bytes.values(), default=0)
        self._least_bytes.clear()

    def cycle_started(self, key: CycleKey, now_ns: int) -> None:
        if key.forward_only and not self._iterations_seen:
            self._evaluating_only(now_ns)
        self.moved_ns = now_ns
        self.predictor.cycle_started(key, now_ns, self._disturbed)
        # One evaluation does not disturb the next; only the training iteration after them differs from the others.
        self._disturbed = self._disturbed if key.forward_only else frozenset()
        self._forward_only = key.forward_only
        if not key.forward_only:
            self.recorder.schedule = key

    def _evaluating_only(self, now_ns: int) -> None:
        """Take a schedule of an evaluation for an iteration: a training without any (``--skip-train``) has no other.

        There is no brake then, since it compares iterations.
        """
        if self._evaluated:
            self._recent_ns.append(now_ns - self.moved_ns)
            if self.board is not None:
                self._look(self.board)
        self._evaluated += 1
        self._disturbed = frozenset()  # by an evaluation before
        self.filling = self.gate is not None and self._evaluated > self.predictor.rule.warmup

    def bubble_opened(self, kind: BubbleKind, index: int, now_ns: int, free_bytes: int | None = None) -> None:
        # An evaluation may have come before a save.
        evaluating = self._forward_only and (kind in PIPELINE_KINDS or kind is BubbleKind.DATA)
        if kind in PIPELINE_KINDS:
            forecast = self.predictor.forecast(kind, index, now_ns)
        else:
            forecast = self._outside.forecast(kind, index, evaluating=evaluating)
        seq = 0
        filling = self.filling and self.control.running
        if filling and forecast.fills and self.gate is not None:
            from_ns = now_ns - self.guard_ns
            ends_ns = [from_ns + end_ns for end_ns in forecast.ends_ns]
            free = self.free_bytes() if free_bytes is None else free_bytes
            seq = self.gate.open(from_ns + forecast.shortest_ns, free, ends_ns, forecast.steps_ns)
        elif self.filling and not filling:
            self._paused = True
        self._promised_bytes = free_bytes
        shortest_ns = forecast.shortest_ns
        self._bubble = Bubble(self.iteration, index, kind, now_ns, 0, shortest_ns, seq, 0, filling, evaluating)

    def bubble_closed(self, now_ns: int) -> None:
        bubble, self._bubble = self._bubble, None
        if bubble is None:
            return
        if bubble.seq and self.gate is not None:
            self.gate.close(now_ns)
        bubble.end_ns = now_ns
        in_cycle = bubble.kind in PIPELINE_KINDS
        if in_cycle:
            self.predictor.observe(bubble.kind, bubble.index, bubble.start_ns, now_ns)
        else:
            duration_ns = now_ns - bubble.start_ns
            rested = self._outside.observe(duration_ns)
            if not bubble.seq and not (rested and duration_ns >= _LEAST_OUTSIDE_NS):
                return
        bubble.free_bytes = free_bytes = self.free_bytes() if self._promised_bytes is None else self._promised_bytes
        if in_cycle and (self._evaluated or not bubble.forward_only):
            self._free_bytes[bubble.index] = free_bytes
        self.recorder.bubble(bubble)

    def computed(self, name: str, start_ns: int, end_ns: int) -> None:
        self.recorder.span(name, self.iteration, start_ns, end_ns)

    def disturbed(self, reason: str) -> None:
        self._disturbed |= {reason}
        self._odd = True
        # An evaluation, a checkpoint or the capture of a CUDA graph may have left less memory free than before.
        self._show_at = min(self._show_at, self._iterations_seen + 1)

    @property
    def waits(self) -> tuple[BubbleKind, int] | None:
        """The kind of the open bubble and its start in ns; None outside bubbles.  For any thread."""
        bubble = self._bubble
        return None if bubble is None else (bubble.kind, bubble.start_ns)

    @property
    def longest_ns(self) -> int:
        """The longest recent iteration in ns; 0 before the first has ended.  For any thread."""
        return max(tuple(self._recent_ns), default=0)

    def finish(self) -> bool:
        """Write the rest of the record at the end of the training; False if not all could be written."""
        self.over.set()
        return self.recorder.close()

    def shut(self) -> None:
        if self.gate is not None:
            self.gate.end()
