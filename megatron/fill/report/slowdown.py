"""Slowdown of the training by filling its bubbles and by watching them, from blocks of iterations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np

from megatron.fill.records.slowdown import over_blocks
from megatron.fill.report.schema import Slowdown
from megatron.fill.types import Iteration

RESAMPLES = 10_000
CHUNKS = 20  # the resamples are drawn in chunks, to bound the memory for a long run
SEED = 0


def paired_slowdown(iterations: Iterable[Iteration]) -> Slowdown | None:
    """Return the slowdown by filling, over pairs of neighbouring blocks (``over_blocks``); None if none is whole.

    The interval is a percentile bootstrap over the pairs, with a fixed seed; from one pair it has no width.
    """
    return _over(over_blocks(iterations))


def watching_slowdown(iterations: Sequence[Iteration]) -> Slowdown | None:
    """Compare unwatched iterations with their two neighbours in the block, watched and not filled; None for no such."""
    at = {one.iteration: one for one in iterations}
    values = []
    for middle in iterations:
        around = [at.get(middle.iteration - 1), at.get(middle.iteration + 1)]
        beside = [one for one in around if one and one.watched and not one.filling and one.block == middle.block]
        if not middle.watched and not middle.filling and len(beside) == 2:
            values.append(fmean(one.duration_ns for one in beside) / middle.duration_ns - 1)
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
