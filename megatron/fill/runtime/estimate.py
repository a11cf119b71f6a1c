"""How long will the next step take?  FreeRide's program-directed time limit, from the task's own measured steps."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence


class StepEstimator:
    """A quantile of the recent step durations.

    Args:
        quantile: 0 to 1; higher overruns less and fills less.
        window: how many recent steps count.
        first_ns: the estimate until a few steps were observed, from a profile; 0 if nothing is known.
    """

    def __init__(self, quantile: float = 0.6, window: int = 32, first_ns: int = 0) -> None:
        self.quantile = quantile
        self.window = window
        self.estimate_ns = first_ns
        self._first_ns = first_ns
        self._recent: deque[int] = deque()
        self._ordered: list[int] = []

    def observe(self, duration_ns: int) -> None:
        recent, ordered = self._recent, self._ordered
        recent.append(duration_ns)
        insort(ordered, duration_ns)
        if len(recent) > self.window:
            del ordered[bisect_left(ordered, recent.popleft())]
        if len(ordered) > 4:
            self.estimate_ns = ordered[int(self.quantile * (len(ordered) - 1))]
        else:
            # The first steps of a task are slow (lazy imports, cold caches): until there are a few, trust the profile,
            # or without one the fastest.
            self.estimate_ns = self._first_ns or ordered[0]


class NodeEstimators:
    """One estimator for each kind of step (``SideTask.next_node``)."""

    def __init__(self) -> None:
        self._estimators: dict[int, StepEstimator] = {}

    def expect(self, durations_ns: Sequence[int]) -> None:
        """Begin anew, with what a profile says of nodes 0, 1, ..."""
        self._estimators = {
            # A node comes once in an iteration: what was long ago says little.
            node: StepEstimator(window=16, first_ns=duration_ns)
            for node, duration_ns in enumerate(durations_ns)
        }

    def estimate_ns(self, node: int) -> int:
        """0 if nothing is known of this node."""
        estimator = self._estimators.get(node)
        return estimator.estimate_ns if estimator else 0

    def observe(self, node: int, duration_ns: int) -> None:
        estimator = self._estimators.get(node)
        if estimator is None:
            estimator = self._estimators[node] = StepEstimator()
        estimator.observe(duration_ns)
