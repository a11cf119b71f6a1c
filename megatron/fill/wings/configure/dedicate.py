"""Worker dedication: which physical rank each logical one should be on the measured network (Pipette, section V).

Simulated annealing over orders.  What moves are *units*: as many ranks next to each other as one tensor-parallel group
shares with its node, so that no group leaves a node that it need not leave.  The energy of an order is
``latency.bound_ns`` of its links.

Many orders are weighed at once, since in arrays that takes little longer than one: the next moves from the present
order, of which the first that is accepted counts and those after it are thrown away.  So what is done is what would be
done one by one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from megatron.fill.wings.configure.energy import Energy
from megatron.fill.wings.mainjob.parallel import Parallel

_COOLING = 0.999  # after each move, as Pipette does
_COLD = 1e-4  # of the first temperature
_MOST_AT_ONCE = 64
_RUNS = 3  # from hot to cold, if there are moves enough for each
_GUIDE = 0.3  # how much the mean of all paths counts beside the longest
_LEAST_OF_RUN = 2000  # moves
_FINALISTS = 8  # orders

type Row = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Dedicated:
    """Result of annealing."""

    orders: tuple[tuple[int, ...], ...]  # the best first: the physical rank of each logical one
    energy_ns: int  # energy of the first
    identity_ns: int  # energy of the cluster's own order
    least_ns: int  # lower bound on the energy of any order
    moves: int  # number of moves tried


def reverse(units: Row, one: int, other: int) -> None:
    """The units from one place to another, backwards."""
    first, last = sorted((one, other))
    units[first : last + 1] = units[first : last + 1][::-1].copy()


def insert(units: Row, one: int, other: int) -> None:
    """The unit of one place, moved to another."""
    unit = units[one]
    if one < other:
        units[one:other] = units[one + 1 : other + 1].copy()
    else:
        units[other + 1 : one + 1] = units[other:one].copy()
    units[other] = unit


def swap(units: Row, one: int, other: int) -> None:
    """Two units, exchanged."""
    units[one], units[other] = units[other], units[one]


def route_insert(units: Row, one: int, other: int) -> None:
    """A stretch of up to a quarter of the units, moved elsewhere."""
    length = max(1, min(abs(one - other), len(units) // 4))
    first = min(one, len(units) - length)
    rest = np.concatenate([units[:first], units[first + length :]])
    at = min(other, len(rest))
    units[:] = np.concatenate([rest[:at], units[first : first + length], rest[at:]])


MOVES: tuple[Callable[[Row, int, int], None], ...] = (reverse, insert, swap, route_insert)
_CHANCES = (0.1, 0.15, 0.65, 0.1)  # of many units: a swap changes least, so it is most often one that is better
_FEW = 16  # units, up to which all moves are as frequent


def anneal(
    energy: Energy,
    its: Parallel,
    gpus_per_node: int,
    seed: int = 0,
    moves: int = 3000,
    within_s: float = math.inf,
    as_pipette: bool = False,
) -> Dedicated:
    """The best orders that were found; the first is never worse than the identity.

    Their energies are bounds, and close to each other: the timeline says which is the shortest.

    The same seed and number of moves give the same order, unless the time runs out first.  It ends early once nothing
    can be better.  It cools down over all the moves or all the time, whichever is over first.

    Args:
        as_pipette: it cools by a thousandth after each move and goes on when it is cold; all moves are as frequent.
    """
    unit = gcd(its.tp, gpus_per_node)
    search = _Search(energy, its.gpus // unit, unit, seed, as_pipette)
    least = energy.least()
    began_s = time.monotonic()
    while search.tried < moves and search.best_ns > least and search.count > 1:
        share = search.tried / moves
        passed_s = time.monotonic() - began_s
        if passed_s >= within_s:
            break
        share = max(share, passed_s / within_s)
        search.step(share, least, moves - search.tried)
    orders = tuple(tuple(search.ranks(np.array(units)).tolist()) for units in search.finalists())
    return Dedicated(orders, search.best_ns, search.identity_ns, least, search.tried)


class _Search:
    """The state of an annealing."""

    def __init__(self, energy: Energy, count: int, unit: int, seed: int, as_pipette: bool) -> None:
        self.count, self._unit, self._energy = count, unit, energy
        self._random = np.random.default_rng(seed)
        self._chances = None if as_pipette or count <= _FEW else np.cumsum(_CHANCES)[:-1]
        self._as_pipette = as_pipette
        self.at = self.best = np.arange(count)
        energies, guides = self._weigh(self.at[None])
        self.identity_ns = self.best_ns = energies[0]
        self._at_guide = self._best_guide = guides[0]
        self._found = {tuple(self.at.tolist()): self.best_ns}  # of those accepted, the best, with their energies
        self.tried = 0
        self._next = 8  # candidates at once
        self._runs_done = 0

    def finalists(self) -> list[tuple[int, ...]]:
        """The best orders of units that were accepted, the best first."""
        best = tuple(self.best.tolist())
        return sorted(self._found, key=lambda units: (self._found[units], units != best))[:_FINALISTS]

    def ranks(self, units: Row) -> Row:
        """The ranks of units, in the last axis."""
        spread = units[..., None] * self._unit + np.arange(self._unit)
        return spread.reshape(*units.shape[:-1], -1)

    def step(self, share: float, least_ns: int, most: int) -> None:
        """Weigh some moves from the present order, until one is accepted.

        Args:
            share: share of the annealing that is done.
            most: moves at most.
        """
        hot = max(1.0, (self.identity_ns - least_ns) / 10)
        runs = max(1, min(_RUNS, (self.tried + most) // _LEAST_OF_RUN))
        run = int(share * runs)
        if not self._as_pipette and run > self._runs_done:
            self._runs_done = run
            self.at, self._at_guide = self.best, self._best_guide
        count = min(self._next, most)
        found = self._candidates(count)
        energies, guides = self._weigh(found)
        chances = self._random.random(count).tolist()
        for number, (found_ns, guide, chance) in enumerate(zip(energies, guides, chances, strict=True)):
            cooled = _COOLING**self.tried if self._as_pipette else _COLD ** (share * runs - run) / (1 + run)
            self.tried += 1
            worse = (guide - self._at_guide) / max(1.0, hot * cooled)
            if worse <= 0 or chance < math.exp(-min(worse, 700.0)):
                self.at, self._at_guide = found[number], guide
                self._found[tuple(self.at.tolist())] = found_ns
                if len(self._found) > 8 * _FINALISTS:
                    self._found = {units: self._found[units] for units in self.finalists()}
                if found_ns < self.best_ns:
                    self.best, self.best_ns, self._best_guide = self.at, found_ns, guide
                self._next = max(4, min(_MOST_AT_ONCE, 2 * (number + 1)))
                return
        self._next = min(_MOST_AT_ONCE, 2 * self._next)

    def _weigh(self, rows: Row) -> tuple[list[int], list[float]]:
        """Energies of orders of units, and what guides the search: for Pipette's the same."""
        energies, means = self._energy.many(self.ranks(rows))
        guides = energies if self._as_pipette else energies + _GUIDE * means
        return energies.tolist(), guides.tolist()

    def _candidates(self, count: int) -> Row:
        """The present order, changed by one move each."""
        found = np.repeat(self.at[None], count, axis=0)
        ones = self._random.integers(self.count, size=count)
        others = (ones + self._random.integers(1, self.count, size=count)) % self.count
        draws = self._random.random(count)
        kinds = (draws * len(MOVES)).astype(int) if self._chances is None else np.searchsorted(self._chances, draws)
        for row, kind, one, other in zip(found, kinds.tolist(), ones.tolist(), others.tolist(), strict=True):
            MOVES[kind](row, one, other)
        return found
