"""The slowdown of a training by filling, from its iterations."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev
from typing import NamedTuple

from megatron.fill.types import Iteration

_LONGEST_PROBE = 8  # unfilled iterations in a row; the brake's probes have one, its pauses at least 64
_BESIDE = 3  # filled iterations on either side that a stretch is compared with, or as many as it has if that is more
_FEWEST_PAIRS = 4


class Estimate(NamedTuple):
    """A mean over pairs, with its 95% interval by Student's t; 0.01 is 1%."""

    mean: float
    low: float
    high: float
    pairs: int


def slowdown(iterations: Sequence[Iteration]) -> Estimate | None:
    """Return the slowdown by filling, from paired blocks or else from the brake's probes and their neighbours."""
    changes = over_blocks(iterations) or _over_probes(iterations)
    count = len(changes)
    if count < _FEWEST_PAIRS:
        return None
    mean, half = fmean(changes), _student(count - 1) * stdev(changes) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)


def over_blocks(iterations: Iterable[Iteration]) -> list[float]:
    """Return the slowdown of each pair of neighbouring blocks, so that slow drifts of the machine cancel.

    Blocks 2k and 2k+1 are a pair.  Its slowdown is the ratio of the median iteration time with filling on to that with
    filling off, minus 1.  A pair is left out if a block is missing, or the run's end cut one to less than half of the
    other.
    """
    pairs: defaultdict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for one in iterations:
        if one.block >= 0 and one.watched:
            pairs[one.block // 2][one.filling].append(one.duration_ns)
    whole = [its for _, its in sorted(pairs.items()) if 2 * min(map(len, its)) >= max(map(len, its))]
    return [median(on) / median(off) - 1 for off, on in whole if median(off) > 0]


def _over_probes(iterations: Sequence[Iteration]) -> list[float]:
    """Compare each short stretch of unfilled iterations with filled ones on either side."""
    found, start = [], 0
    for at in range(1, len(iterations) + 1):
        if at < len(iterations) and iterations[at].filling == iterations[start].filling:
            continue
        size = at - start
        beside = max(size, _BESIDE)
        around = [*iterations[max(0, start - beside) : start], *iterations[at : at + beside]]
        whole = len(around) == 2 * beside and all(one.filling for one in around)
        if not iterations[start].filling and size <= _LONGEST_PROBE and whole:
            unfilled = median(one.duration_ns for one in iterations[start:at])
            found.append(median(one.duration_ns for one in around) / unfilled - 1)
        start = at
    return found


def _student(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t, by the first terms of its expansion about the normal's."""
    z = 1.959964
    terms = [z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384]
    return sum(term / degrees**power for power, term in enumerate(terms))
