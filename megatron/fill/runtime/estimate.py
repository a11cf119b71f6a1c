"""How long will the next step take?  FreeRide's program-directed time limit, from the task's own measured steps."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class StepEstimator:
    """A quantile of the recent step durations.

    Args:
        quantile: 0 to 1; higher overruns less and fills less.
        window: how many recent steps count.
    """

    def __init__(self, quantile: float = 0.6, window: int = 32) -> None:
        self.quantile = quantile
        self.window = window
        self.estimate_ns = 0  # 0: nothing is known yet
        self._recent: deque[int] = deque()
        self._ordered: list[int] = []

    def observe(self, duration_ns: int) -> None:
        recent, ordered = self._recent, self._ordered
        recent.append(duration_ns)
        insort(ordered, duration_ns)
        if len(recent) > self.window:
            del ordered[bisect_left(ordered, recent.popleft())]
        # The first steps of a task are slow (lazy imports, cold caches): until there are a few, trust the fastest.
        rank = int(self.quantile * (len(ordered) - 1)) if len(ordered) > 4 else 0
        self.estimate_ns = ordered[rank]
