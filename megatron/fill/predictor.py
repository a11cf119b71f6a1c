"""When will this bubble end?  Answered from the bubbles at the same place of earlier iterations.

A pipeline's schedule is static, so its bubbles repeat; what varies is noise.  The prediction leans to the early side:
a step caught in flight by the bubble's end delays the main job, an unused tail only wastes a tail.

A bubble begins when this rank is done and ends when another one is, so both add to the noise of its length.  Where
the other rank is the steadier one, the end is told better from the end of the bubble before, when the two last met.
Both are tried, and the steadier one is used.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from megatron.fill.types import BubbleKind, CycleKey

ENOUGH_TO_PLAN = 5  # observations of each bubble


class BubblePredictor:
    """Predicts when one rank's bubbles end, per cycle and position in it.

    Args:
        warmup: observations of a bubble before anything is predicted for it.
        quantile: which quantile of the recent durations is the base of the prediction, 0 (the shortest) to 1.
        margin: how much earlier than that is predicted, in spreads (median less the quantile).
        window: how many recent durations count.
        tolerance: by which factor a duration must miss the prediction to be taken for a change of the cycle and not
            for noise.
        reaching: fill beyond what is predicted, up to the longest recent duration: where a step that is caught by the
            bubble's end holds nobody up.
    """

    def __init__(
        self,
        warmup: int = 5,
        quantile: float = 0.1,
        margin: float = 0.5,
        window: int = 48,
        tolerance: float = 1.3,
        reaching: bool = False,
    ) -> None:
        self.warmup = warmup
        self.quantile = quantile
        self.margin = margin
        self.window = window
        self.tolerance = tolerance
        self.reaching = reaching
        self._histories: dict[CycleKey, list[_History]] = {}
        self._current: list[_History] = []
        self._learning = False
        self._met_ns = 0

    def cycle_started(self, key: CycleKey, now_ns: int, disturbed: bool = False) -> None:
        """The bubbles observed next belong to ``key``.

        A ``disturbed`` cycle (after an evaluation or a checkpoint) is neither predicted nor learnt from: its first
        bubbles wait for something else than the other stages.
        """
        self._current = self._histories.setdefault(key, [])
        self._learning = not disturbed
        self._met_ns = now_ns

    def predict(self, kind: BubbleKind, index: int, now_ns: int) -> int:
        """How long, in ns, the bubble that opens now will last at least, with some confidence; 0 if unknown."""
        if not self._learning or index >= len(self._current):
            return 0
        history = self._current[index]
        if history.kind is not kind or history.seen < self.warmup:
            return 0
        return max(0, history.predict(now_ns - self._met_ns, self))

    def fill_for(self, index: int, predicted_ns: int) -> int:
        """How long, in ns, the bubble that was just predicted may be filled, if it stays open for so long."""
        if not (self.reaching and predicted_ns):
            return predicted_ns
        return max(predicted_ns, self._current[index].from_opening.ordered[-1])

    def expected(self) -> list[tuple[BubbleKind, int]]:
        """The bubbles of the present cycle with the durations that can be counted on, in ns; empty if it is too new.

        A few observations do for a plan; to fill by, ``warmup`` many are asked for.  Bubbles that come in fewer than
        half of the iterations are left out.
        """
        cycles = max((history.seen for history in self._current), default=0)
        if cycles < min(ENOUGH_TO_PLAN, self.warmup):
            return []
        usual = [history for history in self._current if 2 * history.seen >= cycles]
        return [(history.kind, max(0, history.from_opening.low(self)[0])) for history in usual]

    def observe(self, kind: BubbleKind, index: int, start_ns: int, end_ns: int) -> None:
        """Learn when the bubble began and ended."""
        met_ns, self._met_ns = self._met_ns, end_ns
        if not self._learning or index > len(self._current):
            return
        if index == len(self._current):
            self._current.append(_History(kind))
        history = self._current[index]
        if history.kind is not kind:  # the order of the bubbles changed: what was learnt belongs to another cycle
            del self._current[index + 1 :]
            history = self._current[index] = _History(kind)
        history.add(end_ns - start_ns, end_ns - met_ns, self)


class _Window:
    """The recent values of something, in order of time and of size."""

    __slots__ = ("ordered", "recent")

    def __init__(self) -> None:
        self.recent: deque[int] = deque()
        self.ordered: list[int] = []

    def add(self, value: int, most: int) -> None:
        self.recent.append(value)
        insort(self.ordered, value)
        while len(self.recent) > most:
            del self.ordered[bisect_left(self.ordered, self.recent.popleft())]

    def low(self, rule: BubblePredictor) -> tuple[int, int]:
        """The value that is rarely undercut, and the spread of the values."""
        ordered = self.ordered
        base = ordered[int(rule.quantile * (len(ordered) - 1))]
        spread = ordered[len(ordered) // 2] - base
        return base - int(rule.margin * spread), spread


class _History:
    """The recent bubbles at one position of the cycle."""

    __slots__ = ("cap_ns", "from_meeting", "from_opening", "kind", "seen", "surprises", "usual_ns")

    def __init__(self, kind: BubbleKind) -> None:
        self.kind = kind
        self.seen = 0
        self.surprises = 0
        self.usual_ns = 0
        self.cap_ns: int | None = None
        self.from_opening = _Window()  # from its own opening to its end
        self.from_meeting = _Window()  # from the end of the bubble before (or the start of the cycle) to its end

    def predict(self, since_meeting_ns: int, rule: BubblePredictor) -> int:
        duration_ns, spread = self.from_opening.low(rule)
        other_ns, other_spread = self.from_meeting.low(rule)
        if other_spread < 0.9 * spread:
            duration_ns = other_ns - since_meeting_ns
        self.usual_ns = duration_ns
        return duration_ns if self.cap_ns is None else min(duration_ns, self.cap_ns)

    def add(self, duration_ns: int, since_meeting_ns: int, rule: BubblePredictor) -> None:
        self.seen += 1
        # Suddenly shorter: believe it at once, for overrunning is what harms.
        self.cap_ns = duration_ns if duration_ns * rule.tolerance < self.usual_ns else None
        # Suddenly longer: believe it after three in a row, for the old durations only hold the prediction down.
        self.surprises = self.surprises + 1 if 0 < self.usual_ns * rule.tolerance < duration_ns else 0
        most = rule.window
        if self.surprises >= 3:
            self.surprises, most = 0, 3
        self.from_opening.add(duration_ns, most)
        self.from_meeting.add(since_meeting_ns, most)
