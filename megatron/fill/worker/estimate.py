"""Estimates of the next step's duration, from measured steps (FreeRide's program-directed time limit)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence

QUANTILE = 0.6  # of the recent durations of a step; higher overruns less and fills less
WINDOW = 32  # number of recent steps that count


class StepEstimator:
    """A quantile of the recent step durations."""

    def __init__(self) -> None:
        self.estimate_ns = 0  # 0 while unknown
        self.count = 0  # number of recent steps that were observed
        self._recent: deque[int] = deque()
        self._ordered: list[int] = []

    @property
    def sure(self) -> bool:
        """True if there are more observations than the first few, which are slow (lazy imports, cold caches)."""
        return self.count > 4

    def observe(self, duration_ns: int) -> None:
        recent, ordered = self._recent, self._ordered
        recent.append(duration_ns)
        insort(ordered, duration_ns)
        if len(recent) > WINDOW:
            del ordered[bisect_left(ordered, recent.popleft())]
        self.count = len(ordered)
        # Until there are more than a few, take the shortest.
        self.estimate_ns = ordered[int(QUANTILE * (len(ordered) - 1)) if self.sure else 0]


class NodeEstimators:
    """Estimators by kind of step (``SideTask.next_node``).

    A node of a long list comes rarely, so its profiled duration is used for longer.  It is multiplied by the recent
    slowdown of all nodes against their profiles, since a cause of slowdown (the host, the training) affects all nodes.
    """

    def __init__(self) -> None:
        self._profile_ns: Sequence[int] = ()
        self._slower = StepEstimator()  # in thousandths of the profile
        self._estimators: defaultdict[int, StepEstimator] = defaultdict(StepEstimator)

    def expect(self, durations_ns: Sequence[int]) -> None:
        """Restart with the profiled durations of nodes 0, 1, ..."""
        self._profile_ns = durations_ns
        self._estimators.clear()

    def has_seen(self, node: int) -> bool:
        """True if the node has run here, apart from its profile."""
        return node in self._estimators

    def seen_once(self, node: int) -> bool:
        """True if the estimate for this node comes from a single step, and from no profile."""
        return node >= len(self._profile_ns) and node in self._estimators and self._estimators[node].count == 1

    def estimate_ns(self, node: int) -> int:
        """Return the estimate for this node; 0 if unknown."""
        estimator = self._estimators.get(node)
        if estimator is not None and estimator.sure:
            return estimator.estimate_ns
        if node < len(self._profile_ns):
            return self._profile_ns[node] * (self._slower.estimate_ns if self._slower.sure else 1000) // 1000
        return estimator.estimate_ns if estimator is not None else 0

    def observe(self, node: int, duration_ns: int) -> None:
        self._estimators[node].observe(duration_ns)
        if node < len(self._profile_ns) and self._profile_ns[node]:
            self._slower.observe(1000 * duration_ns // self._profile_ns[node])
