"""How long will this bubble last?  Answered from the bubbles at the same place of earlier iterations.

A pipeline's schedule is static, so its bubbles repeat; what varies is noise.  The prediction is a low quantile of the
recent durations: a step caught in flight by the bubble's end delays the main job, an unused tail only wastes a tail.
"""

from __future__ import annotations

from collections import deque

from megatron.fill.types import BubbleKind, CycleKey


class BubblePredictor:
    """Predicts one rank's bubble durations, per cycle and position in it.

    Args:
        warmup: observations of a bubble before anything is predicted for it.
        quantile: which quantile of the recent durations is predicted, 0 (the shortest) to 1.
        window: how many recent durations count.
        tolerance: by which factor a duration must miss the prediction to be taken for a change of the cycle and not
            for noise.
    """

    def __init__(self, warmup: int = 5, quantile: float = 0.2, window: int = 24, tolerance: float = 1.3) -> None:
        self.warmup = warmup
        self.quantile = quantile
        self.window = window
        self.tolerance = tolerance
        self._histories: dict[CycleKey, list[_History]] = {}
        self._current: list[_History] = []
        self._learning = False

    def cycle_started(self, key: CycleKey, disturbed: bool = False) -> None:
        """The bubbles observed next belong to ``key``.

        A ``disturbed`` cycle (after an evaluation or a checkpoint) is neither predicted nor learnt from: its first
        bubbles wait for something else than the other stages.
        """
        self._current = self._histories.setdefault(key, [])
        self._learning = not disturbed

    def predict(self, kind: BubbleKind, index: int) -> int:
        """The duration in ns that this bubble will last at least, with some confidence; 0 when nothing is known."""
        if not self._learning or index >= len(self._current):
            return 0
        history = self._current[index]
        if history.kind is not kind or history.seen < self.warmup:
            return 0
        return history.prediction

    def observe(self, kind: BubbleKind, index: int, duration_ns: int) -> None:
        """Learn how long the bubble lasted."""
        if not self._learning:
            return
        if index == len(self._current):
            self._current.append(_History(kind))
        elif index > len(self._current):
            return
        history = self._current[index]
        if history.kind is not kind:  # the order of the bubbles changed: what was learnt belongs to another cycle
            del self._current[index + 1 :]
            history = self._current[index] = _History(kind)
        history.add(duration_ns, self)


class _History:
    """The recent durations of one position, and the prediction for its next bubble."""

    __slots__ = ("durations", "kind", "prediction", "seen", "surprises")

    def __init__(self, kind: BubbleKind) -> None:
        self.kind = kind
        self.durations: deque[int] = deque()
        self.prediction = 0
        self.seen = 0
        self.surprises = 0

    def add(self, duration_ns: int, rule: BubblePredictor) -> None:
        durations = self.durations
        self.seen += 1
        longer = self.prediction and duration_ns > self.prediction * rule.tolerance
        self.surprises = self.surprises + 1 if longer else 0
        durations.append(duration_ns)
        if self.surprises >= 3 and len(durations) > 3:
            # Three in a row are no noise: the cycle has become longer.  The old durations only hold the prediction
            # down, and erring that way wastes bubbles but harms nobody, hence three and not one.
            while len(durations) > 3:
                durations.popleft()
            self.surprises = 0
        elif len(durations) > rule.window:
            durations.popleft()
        ordered = sorted(durations)
        prediction = ordered[int(rule.quantile * (len(ordered) - 1))]
        if duration_ns * rule.tolerance < prediction:
            prediction = duration_ns  # suddenly shorter: believe it at once, for overrunning is what harms
        self.prediction = prediction
