"""Statistical test whether the training is slower with filling than without, from few and noisy iteration times.

Filling is off for an iteration now and then; that and its filled neighbours are a *pair*, and the logarithm of the
ratio of their times is the pair's *change*.  A slow drift affects both and cancels.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

_MOST_PAIRS = 128
_LATELY = 16  # number of latest pairs among which a slowdown that has just begun is looked for
_MOST_STEPS = 96  # number of recent iterations from which the noise is estimated
_FEWEST_STEPS = 8
_TO_SIGMA = 1.4826 / math.sqrt(2)  # from the median |difference| of two normal values to the deviation of one
_TRIMMED = 1.1  # ratio of the midmean's standard deviation to the mean's, under normal noise, from four values on
_SURE = 3.0  # standard deviations above the limit that are required; more with few pairs
_FEW_PAIRS = 20.0
_LEAST = -4.0  # standard deviations of a pair; a lower change is that of an outlier among few unfilled iterations


class Noise:
    """The standard deviation of the logarithms of iteration times.

    It is estimated from the differences between successive iterations of the same kind (filled or not).
    """

    def __init__(self) -> None:
        self._last: dict[bool, float] = {}
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)

    def add(self, filling: bool, log_time: float) -> None:
        if filling in self._last:
            self._steps.append(abs(log_time - self._last[filling]))
        self._last[filling] = log_time

    @property
    def sigma(self) -> float | None:
        """The standard deviation; None before there are ``_FEWEST_STEPS`` differences."""
        if len(self._steps) < _FEWEST_STEPS:
            return None
        return _TO_SIGMA * sorted(self._steps)[len(self._steps) // 2]


class Evidence:
    """Tests the latest pairs against the limit, the accepted slowdown as a fraction (0.01 is 1%)."""

    def __init__(self, limit: float) -> None:
        self._limit = math.log1p(limit)
        self._pairs: deque[tuple[float, float]] = deque(maxlen=_MOST_PAIRS)  # change, and its variance in sigma^2

    def add(self, on: Sequence[float], off: Sequence[float], sigma: float) -> None:
        """Add a pair, of the logarithms of the iteration times with and without filling; neither is empty."""
        variance = _variance(len(on)) + _variance(len(off))
        change = midmean(on) - midmean(off)
        self._pairs.append((max(change, _LEAST * sigma * math.sqrt(variance)), variance))

    def clear(self) -> None:
        self._pairs.clear()

    def verdict(self, sigma: float) -> tuple[float, int] | None:
        """Return the slowdown if it surely exceeds the limit over some number of the latest pairs, otherwise None.

        It is a fraction (0.03 is 3%), and comes with the number of pairs, two or more, for which it is the surest.
        For every number of pairs, a lower confidence bound of the mean change is compared with the limit.  Its standard
        deviation is the larger one of two estimates: from the noise of single iterations (reliable when there are few
        pairs), and from the scatter of the pairs (includes slow noise, and grows with an outlier).
        """
        surest, slowdown, pairs = 0.0, 0.0, 0
        for count, (mean, deviation) in enumerate(self._means(sigma), 2):
            excess = mean - self._limit - _SURE * (1 + _FEW_PAIRS / (count * count)) * deviation
            if excess > surest:
                surest, slowdown, pairs = excess, math.expm1(mean), count
        return (slowdown, pairs) if pairs else None

    def suspicion(self, sigma: float) -> float:
        """Return the excess of all pairs' mean change over the limit, in standard deviations; negative if below."""
        count = len(self._pairs)
        if count < 2:
            return -1.0
        mean, deviation = self._means(sigma)[-1]
        return (mean - self._limit) / max(deviation, 1e-9)

    def doubt(self, sigma: float) -> float:
        """Return the largest excess over the limit of the latest 1, 2, ... pairs' mean change, in standard deviations.

        A slowdown that begins after many good pairs shows in the latest ones long before it does in all.
        """
        change, variance = self._pairs[-1]
        means = [(change, sigma * math.sqrt(variance)), *self._means(sigma)[: _LATELY - 1]]
        return max((mean - self._limit) / max(deviation, 1e-9) for mean, deviation in means)

    def _means(self, sigma: float) -> list[tuple[float, float]]:
        """Return the mean and its standard deviation over the latest 2, 3, 4, ... pairs."""
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


def _variance(count: int) -> float:
    """Return the variance of the midmean of so many values, in that of one."""
    return (1.0 if count < 4 else _TRIMMED**2) / count


def midmean(values: Sequence[float]) -> float:
    """Return the mean of the middle half, which one outlier among four does not affect."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    return sum(middle) / len(middle)
