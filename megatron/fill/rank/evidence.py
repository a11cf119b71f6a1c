"""Is the training slower with filling than without?  Decided from iteration times, which are few and noisy.

Filling goes off for a few iterations now and then; those and their filled neighbours are a *pair*, and the logarithm
of the ratio of their times is the pair's change.  What drifts slowly is in both and cancels.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_PAIRS = 64
_MOST_STEPS = 96  # of the noise, in iterations
_FEWEST_STEPS = 8
_TO_SIGMA = 1.4826 / math.sqrt(2)  # from the median |difference| of two normal values to the deviation of one
_TRIMMED = 1.1  # how much more a mean without its outer quarters scatters than the plain mean, under normal noise
_SURE = 2.6  # deviations; with few pairs more are asked for
_FEW_PAIRS = 8.0


@dataclass(frozen=True, slots=True)
class MeasuredSlowdown:
    """A slowdown (0.03 is 3%), over how many of the latest pairs it was measured, and how far above the limit it
    surely is (a difference of logarithms; above 0: surely over the limit)."""

    slowdown: float
    pairs: int
    excess: float


class Noise:
    """How much an iteration's time differs from that of the one before it of the same kind (filled or not): the
    deviation of its logarithm."""

    def __init__(self) -> None:
        self._last: dict[bool, float] = {}
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)

    def add(self, filling: bool, log_time: float) -> None:
        if filling in self._last:
            self._steps.append(abs(log_time - self._last[filling]))
        self._last[filling] = log_time

    @property
    def sigma(self) -> float | None:
        """None while too little is known."""
        if len(self._steps) < _FEWEST_STEPS:
            return None
        return _TO_SIGMA * sorted(self._steps)[len(self._steps) // 2]


class Evidence:
    """The latest pairs.

    Args:
        limit: the slowdown that is accepted; 0.01 is 1%.
    """

    def __init__(self, limit: float) -> None:
        self._limit = math.log1p(limit)
        self._pairs: deque[tuple[float, float]] = deque(maxlen=_MOST_PAIRS)  # the change; its variance in sigma^2

    def add(self, on: Sequence[float], off: Sequence[float]) -> None:
        """One more pair: the logarithms of its iteration times, some of each kind."""
        self._pairs.append((midmean(on) - midmean(off), _TRIMMED**2 * (1 / len(on) + 1 / len(off))))

    def clear(self) -> None:
        self._pairs.clear()

    def verdict(self, sigma: float) -> MeasuredSlowdown | None:
        """The slowdown, if it surely exceeds the limit: over the latest two pairs, or three, or more.

        A lower confidence bound of the mean change is compared with the limit, for every number of pairs.  The mean's
        deviation is the larger of what the noise of single iterations makes of it (which is known well when the pairs
        are few) and what the pairs themselves show (which holds slow noise too, and grows with an outlier).
        """
        found = [measured for measured in self._bounds(sigma) if measured.excess > 0]
        return max(found, key=lambda measured: measured.excess, default=None)

    def suspicion(self, sigma: float) -> float:
        """By how many deviations the mean change of all pairs exceeds the limit; below 0: it does not."""
        count = len(self._pairs)
        if count < 2:
            return -1.0
        mean, deviation = self._means(sigma)[-1]
        return (mean - self._limit) / max(deviation, 1e-9)

    def surprise(self, sigma: float) -> float:
        """The same of the latest pair alone."""
        change, variance = self._pairs[-1]
        return (change - self._limit) / max(sigma * math.sqrt(variance), 1e-9)

    def _bounds(self, sigma: float) -> list[MeasuredSlowdown]:
        return [
            MeasuredSlowdown(
                math.expm1(mean), count, mean - self._limit - _SURE * (1 + _FEW_PAIRS / (count * count)) * deviation
            )
            for count, (mean, deviation) in enumerate(self._means(sigma), 2)
        ]

    def _means(self, sigma: float) -> list[tuple[float, float]]:
        """Mean and its deviation over the latest 2, 3, 4, ... pairs."""
        found = []
        total = squares = variance = 0.0
        for count, (change, its_variance) in enumerate(reversed(self._pairs), 1):
            total += change
            squares += change * change
            variance += its_variance
            if count > 1:
                mean = total / count
                shown = math.sqrt(max(0.0, squares - count * mean * mean) / (count - 1) / count)
                found.append((mean, max(sigma * math.sqrt(variance) / count, shown)))
        return found


def midmean(values: Sequence[float]) -> float:
    """The mean of the middle half: an outlier among four does not move it."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)
