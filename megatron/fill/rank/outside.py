"""Prediction of the waits outside the pipeline: in a save, for the next batch, and in collectives of the own stage.

They come seldom, or are usually short, and nothing bounds them.  So a wait is expected to last as long as the shortest
of the last ones at its place, the first one there is not predicted, and a step begins only if it ends before.  Places
are the waits of a save, the batches and the collectives of a training iteration (those of its replicas, say), and the
batches of a schedule in an evaluation.

A wait is worth filling only if the rank itself rests in it: a loader without workers computes the batch in the rank's
own thread, a save in the background copies, and a reduction on the CPU adds up.  A wait in which the rank's process
used its cores for more than ``_MOST_BUSY`` of the time therefore counts as one of no length.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from megatron.fill.rank.predictor import Forecast
from megatron.fill.types import BubbleKind

_LAST = 5  # number of waits at a place that count
_MOST_PLACES = 1024  # further waits of a save or an iteration are not predicted
_MOST_BUSY = 0.25


@dataclass(eq=False, repr=False)
class OutsidePredictor:
    """Predicts one rank's waits outside the pipeline."""

    min_bubble_ns: int  # least expected length of a wait that is filled
    cpu_ns: Callable[[], int] = time.process_time_ns  # returns the time for which the rank's process has used its cores

    def __post_init__(self) -> None:
        self._began_cpu_ns = 0
        self._last: defaultdict[tuple[BubbleKind, bool, int], deque[int]] = defaultdict(lambda: deque(maxlen=_LAST))
        self._place = BubbleKind.SAVE, False, 0  # of the present wait

    def forecast(self, kind: BubbleKind, index: int, *, evaluating: bool = False) -> Forecast:
        """Return the prediction for the wait that begins now."""
        self._began_cpu_ns = self.cpu_ns()
        self._place = kind, evaluating, index
        shortest_ns = min(self._last.get(self._place, ()), default=0)
        return Forecast(shortest_ns, fills=shortest_ns >= self.min_bubble_ns)

    def observe(self, duration_ns: int) -> bool:
        """Learn from the wait that ends now; False if the rank was busy in it."""
        rested = self.cpu_ns() - self._began_cpu_ns <= _MOST_BUSY * duration_ns
        if self._place[-1] < _MOST_PLACES:
            self._last[self._place].append(duration_ns if rested else 0)
        return rested
