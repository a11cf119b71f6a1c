"""Slowdown of the training by filling its bubbles and by watching them, from blocks of iterations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

from megatron.fill.report.schema import Slowdown
from megatron.fill.types import Iteration

RESAMPLES = 10_000
CHUNKS = 20  # the resamples are drawn in chunks, to bound the memory for a long run
SEED = 0


def paired_slowdown(iterations: Sequence[Iteration]) -> Slowdown | None:
    """Compare neighbouring blocks, so that slow drifts of the machine cancel.

    Blocks 2k and 2k+1 are a pair.  Its value is the ratio of the median iteration time with filling on to that with
    filling off, minus 1.  The interval is a percentile bootstrap over the pairs, with a fixed seed; from one pair it
    has no width.

    Returns:
        None if no pair is complete: a block is missing, or the run's end cut one to less than half of the other.
    """
    times: defaultdict[int, dict[bool, list[int]]] = defaultdict(lambda: {True: [], False: []})
    for iteration in iterations:
        if iteration.block >= 0 and iteration.watched:
            times[iteration.block // 2][iteration.filling].append(iteration.end_ns - iteration.start_ns)
    values = [
        median(pair[True]) / median(pair[False]) - 1
        for _, pair in sorted(times.items())
        if _complete(pair[True], pair[False]) and median(pair[False]) > 0
    ]
    return _over(values)


def watching_slowdown(iterations: Sequence[Iteration]) -> Slowdown | None:
    """Compare each unwatched iteration with its two neighbours, which are watched and not filled either.

    Returns:
        None if no unwatched iteration has two such neighbours in its block.
    """
    at = {one.iteration: one for one in iterations}
    values = []
    for middle in iterations:
        around = [at.get(middle.iteration - 1), at.get(middle.iteration + 1)]
        beside = [one for one in around if one and one.watched and not one.filling and one.block == middle.block]
        if not middle.watched and not middle.filling and len(beside) == 2:
            values.append(fmean(one.end_ns - one.start_ns for one in beside) / (middle.end_ns - middle.start_ns) - 1)
    return _over(values)


def _over(values: Sequence[float]) -> Slowdown | None:
    """Return the mean of the pairs with its bootstrap interval; None for no pair."""
    if not values:
        return None
    pairs = np.asarray(values)
    random = np.random.default_rng(SEED)
    shape = (RESAMPLES // CHUNKS, len(pairs))
    means = [pairs[random.integers(len(pairs), size=shape)].mean(axis=1) for _ in range(CHUNKS)]
    low, high = np.percentile(means, [2.5, 97.5])
    return Slowdown(mean=float(pairs.mean()), ci95=(float(low), float(high)), pairs=len(values))


def _complete(on: list[int], off: list[int]) -> bool:
    return 2 * min(len(on), len(off)) >= max(len(on), len(off)) > 0
