"""Candidate stages: their microbatches and devices, within a limit on the time per sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from math import ceil
from typing import NamedTuple

from megatron.fill.wings.graph.cost import Costs
from megatron.fill.wings.graph.model import members
from megatron.fill.wings.graph.schedule import upstream

_ROUNDING = 1e-9  # relative difference of times that are equal except for the order of their sums


class Choice(NamedTuple):
    """A stage of a plan under construction."""

    mask: int
    micro_batch: int
    replicas: int


class Link(NamedTuple):
    """The stages of a part of a plan, shared between the plans that contain it."""

    choice: Choice | None
    parts: tuple[Link, ...] = ()  # links whose stages come before ``choice``, upstream first
    # Positions of operators in ``parts``, and positions of the like operators that replace them.
    moved: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def choices(self) -> Iterator[Choice]:
        """Yield all stages, each after those that it depends on."""
        if self.moved is None:
            for part in self.parts:
                yield from part.choices()
        else:
            to = dict(zip(*self.moved, strict=True))
            for part in self.parts:
                for its in part.choices():
                    yield its._replace(mask=sum(1 << to[at] for at in members(its.mask)))
        if self.choice is not None:
            yield self.choice


class Entry(NamedTuple):
    """A way to run a part of the model."""

    devices: int  # number of devices used
    need: tuple[int, ...]  # samples in flight in a stage upstream, per microbatch size that this stage may have
    link: Link


def best(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries that no other one matches in devices and in every need."""
    kept: list[Entry] = []
    for entry in sorted(entries, key=lambda its: (its.devices, sum(its.need))):
        if not any(all(a <= b for a, b in zip(its.need, entry.need, strict=True)) for its in kept):
            kept.append(entry)
    return tuple(kept)


def divisions(sizes: Iterable[int], devices: int) -> list[tuple[int, int]]:
    """Return each size of microbatches with each number of devices over which it can be divided."""
    return [(size, count) for size in sizes for count in range(1, min(size, devices) + 1) if size % count == 0]


class Options:
    """The candidate stages within a limit on the time per sample.

    Args:
        sizes: microbatch sizes that stages may have, in samples; divisors of the batch, ascending.
        limit_s: maximum seconds per sample.
    """

    def __init__(self, costs: Costs, sizes: Sequence[int], limit_s: float) -> None:
        self.costs = costs
        self.sizes = tuple(sizes)
        self.limit_s = limit_s * (1 + _ROUNDING)
        self.devices = costs.cluster.devices
        divided = divisions(sizes, self.devices)
        self._widest = max(count for _, count in divided)  # devices of a stage
        parts = sorted({size // count for size, count in divided})
        tables = [[sum(passes) / part for passes in costs.each(part)] for part in parts]
        self._least = [min(column) for column in zip(*tables, strict=True)]
        self._loads: dict[int, float] = {}
        self._needs: dict[tuple[int, int], tuple[int, ...]] = {}
        self._times: dict[int, list[list[tuple[int, float, float]]]] = {}
        self.first = tuple(sizes)  # the need without a stage downstream: i is the stage's own microbatch
        self.total = self.load(costs.graph.everything)

    def within(self, limit_s: float) -> Options:
        """Return a copy with another limit, which shares everything that does not depend on it."""
        other = copy(self)
        other.limit_s = limit_s * (1 + _ROUNDING)
        return other

    def load(self, mask: int) -> float:
        """Lower bound on a set of operators' device time per sample, in seconds."""
        if mask not in self._loads:
            self._loads[mask] = sum(self._least[at] for at in members(mask))
        return self._loads[mask]

    def fewest(self, mask: int) -> int:
        """Lower bound on the number of devices for these operators, in any number of stages."""
        return ceil(self.load(mask) / self.limit_s)

    def room(self, mask: int) -> int:
        """Upper bound on the number of devices that all other operators leave for these."""
        return self.devices - ceil((self.total - self.load(mask)) / self.limit_s)

    def fits(self, mask: int, most: int) -> bool:
        """True unless the load of these operators alone rules out a single stage on ``most`` devices."""
        return self.load(mask) <= min(most, self._widest) * self.limit_s

    def stages(self, mask: int, need: tuple[int, ...], most: int) -> tuple[Entry, ...]:
        """The stages of these operators on at most ``most`` devices, without those that another one matches.

        Each microbatch size gets its smallest number of devices: more would change nothing for the stages upstream.

        Args:
            need: samples in flight that the stages downstream require, per microbatch size.
        """
        found = []
        for size, samples, choices in zip(self.sizes, need, self._choices(mask), strict=True):
            for replicas, time_s, room in choices:
                if time_s <= self.limit_s and replicas <= most and samples <= room:
                    found.append(Entry(replicas, self._left(samples, size), Link(Choice(mask, size, replicas))))
                    break
        return best(found)

    def _left(self, samples: int, size: int) -> tuple[int, ...]:
        """The need that a stage leaves upstream."""
        key = samples, size
        if key not in self._needs:
            self._needs[key] = tuple([upstream(samples, size, other, self.costs.batch) for other in self.sizes])
        return self._needs[key]

    def _choices(self, mask: int) -> list[list[tuple[int, float, float]]]:
        """Per microbatch size, each device count with its seconds per sample and the samples in flight that fit."""
        if mask not in self._times:
            rooms = [self.costs.most_in_flight(mask, replicas) for replicas in range(self.devices + 1)]
            self._times[mask] = [
                [
                    (replicas, self.costs.time_per_sample_s(mask, size, replicas), rooms[replicas])
                    for _, replicas in divisions((size,), self.devices)
                    if rooms[replicas] >= size
                ]
                for size in self.sizes
            ]
        return self._times[mask]
