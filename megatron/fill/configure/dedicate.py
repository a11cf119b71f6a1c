"""Worker dedication: which physical rank each logical one should be on the measured network (Pipette, section V).

Simulated annealing over orders.  What moves are *units*: as many ranks next to each other as one tensor-parallel group
shares with its node, so that no group leaves a node that it need not leave.  The energy of an order is
``latency.bound_ns`` of its links; a stage's links are looked up again only where a move touched the stage.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from megatron.fill.configure.latency import bound_ns, iteration
from megatron.fill.configure.layout import Layout, StageRoutes, both_ways, stage_routes
from megatron.fill.configure.links import Links, Route
from megatron.fill.configure.passes import Passes
from megatron.fill.mainjob.hardware import GpuKind
from megatron.fill.mainjob.model import ModelSpec
from megatron.fill.mainjob.parallel import Parallel

_COOLING = 0.999
_COLD = 1e-4  # of the first temperature: restart from the best order
_KEPT = 20_000  # entries of each cache; a few hundred bytes each


class Energy:
    """What a configuration's iteration takes at least, in nanoseconds, by the order of its ranks."""

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuKind,
        efficiency: float,
        its: Parallel,
        links: Links,
        passes: Passes | None = None,
    ) -> None:
        self._model, self._gpu, self._efficiency, self._its, self._links = model, gpu, efficiency, its, links
        self._passes = passes
        self._stages: dict[tuple[int, ...], StageRoutes] = {}
        self._boundaries: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[Route, Route], ...]] = {}

    def __call__(self, order: Sequence[int]) -> int:
        its = self._its
        size = its.tp * its.replicas
        rows = [tuple(order[at : at + size]) for at in range(0, its.gpus, size)]
        following = [*rows[1:], rows[0]] if its.pp > 1 else []
        boundaries = [self._boundary(here, there) for here, there in zip(rows, following, strict=False)]
        replicas = tuple(dict.fromkeys(zip(*boundaries, strict=True))) or ((),)
        ends = self._links.ring(zip(rows[0], rows[-1], strict=True)) if its.pp > 1 else Route()
        layout = Layout(tuple(self._stage(row) for row in rows), replicas, ends)
        return bound_ns(iteration(self._model, self._gpu, self._efficiency, its, layout, self._passes))

    def _stage(self, ranks: tuple[int, ...]) -> StageRoutes:
        if ranks not in self._stages:
            if len(self._stages) >= _KEPT:
                self._stages.clear()
            self._stages[ranks] = stage_routes(self._links, self._its, ranks)
        return self._stages[ranks]

    def _boundary(self, here: tuple[int, ...], there: tuple[int, ...]) -> tuple[tuple[Route, Route], ...]:
        key = here, there
        if key not in self._boundaries:
            if len(self._boundaries) >= _KEPT:
                self._boundaries.clear()
            self._boundaries[key] = both_ways(self._links, self._its, here, there)
        return self._boundaries[key]

    def least(self) -> int:
        """What no order is below: each link of the layout is the best that there is."""
        ranks = range(self._its.gpus)
        links = self._links
        if len(ranks) == 1:
            return self(ranks)
        speed = max(links.bytes_per_s[one][other] for one in ranks for other in ranks if one != other)
        latency = min(links.latency_s[one][other] for one in ranks for other in ranks if one != other)
        best = Links([[speed] * len(ranks)] * len(ranks), [[latency] * len(ranks)] * len(ranks), (0,) * len(ranks))
        return Energy(self._model, self._gpu, self._efficiency, self._its, best, self._passes)(ranks)


@dataclass(frozen=True, slots=True)
class Dedicated:
    """What annealing found.

    Attributes:
        order: the physical rank of each logical one.
        energy_ns: of the order; ``identity_ns`` that of the cluster's own order, ``least_ns`` what none is below.
        moves: how many were tried.
    """

    order: tuple[int, ...]
    energy_ns: int
    identity_ns: int
    least_ns: int
    moves: int


def reverse(units: list[int], one: int, other: int) -> list[int]:
    """The units from one place to another, backwards."""
    first, last = sorted((one, other))
    return units[:first] + units[first : last + 1][::-1] + units[last + 1 :]


def insert(units: list[int], one: int, other: int) -> list[int]:
    """The unit of one place, moved to another."""
    rest = units[:one] + units[one + 1 :]
    return [*rest[:other], units[one], *rest[other:]]


def swap(units: list[int], one: int, other: int) -> list[int]:
    """Two units, exchanged."""
    found = list(units)
    found[one], found[other] = found[other], found[one]
    return found


def route_insert(units: list[int], one: int, other: int) -> list[int]:
    """A stretch of up to a quarter of the units, moved elsewhere."""
    length = max(1, min(abs(one - other), len(units) // 4))
    first = min(one, len(units) - length)
    rest = units[:first] + units[first + length :]
    at = min(other, len(rest))
    return rest[:at] + units[first : first + length] + rest[at:]


MOVES: tuple[Callable[[list[int], int, int], list[int]], ...] = (reverse, insert, swap, route_insert)


def anneal(
    energy: Energy,
    its: Parallel,
    gpus_per_node: int,
    seed: int = 0,
    moves: int = 3000,
    within_s: float = math.inf,
    restarts: bool = True,
) -> Dedicated:
    """The best order that was found; never worse than the identity.

    The same seed and number of moves give the same order, unless the time runs out first.  It ends early once nothing
    can be better.

    Args:
        restarts: from the best order when it is cold; without, it goes on cooling, as Pipette does.
    """
    unit = gcd(its.tp, gpus_per_node)
    source = random.Random(seed)
    units = list(range(its.gpus // unit))

    def spread(row: Sequence[int]) -> list[int]:
        return [one * unit + within for one in row for within in range(unit)]

    identity = at = best_ns = energy(spread(units))
    least = energy.least()
    best = units
    hot = temperature = max(1.0, (identity - least) / 10)
    until_s = time.monotonic() + within_s
    tried = 0
    while tried < moves and best_ns > least and len(units) > 1 and time.monotonic() < until_s:
        tried += 1
        one, other = source.sample(range(len(units)), 2)
        found = source.choice(MOVES)(units, one, other)
        found_ns = energy(spread(found))
        if found_ns <= at or source.random() < math.exp((at - found_ns) / temperature):
            units, at = found, found_ns
            if at < best_ns:
                best, best_ns = units, at
        temperature *= _COOLING
        if restarts and temperature < hot * _COLD:
            units, at, temperature = best, best_ns, hot / 2
    return Dedicated(tuple(spread(best)), best_ns, identity, least, tried)
