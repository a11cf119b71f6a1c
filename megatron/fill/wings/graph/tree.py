"""The series-parallel decomposition of a model's graph.

Two operators are *comparable* if one depends on the other.  Two sets of operators are side by side if no operator of
one is comparable to one of the other, and in series if all are.  A set that can be split neither way is not
series-parallel: the smallest is four operators, ``a -> c, a -> d, b -> d``.  Such a set is put into a line, which can
only make plans slower.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_

from megatron.fill.wings.graph.model import ModelGraph, members

type Chain = tuple[Item, ...]  # in series
type Item = int | tuple[Chain, ...]  # one operator's set, or branches side by side


def decompose(graph: ModelGraph) -> tuple[Chain, tuple[int, ...]]:
    """Return the whole graph as a chain, and the sets put into a line in it because they are not series-parallel."""
    lined: list[int] = []
    rank = {at: number for number, at in enumerate(graph.order)}

    def chain(mask: int) -> Chain:
        if not mask & (mask - 1):
            return (mask,)
        related = _components(mask, lambda at: graph.before[at] | graph.after[at])
        if len(related) > 1:
            return (tuple(chain(part) for part in related),)
        unrelated = _components(mask, lambda at: ~(graph.before[at] | graph.after[at]))
        if len(unrelated) > 1:
            unrelated.sort(key=lambda part: min(rank[at] for at in members(part)))
            return tuple(item for part in unrelated for item in chain(part))
        lined.append(mask)
        return line(graph, mask)

    return chain(graph.everything), tuple(lined)


def line(graph: ModelGraph, mask: int) -> Chain:
    """Return a set's operators in series, each after its inputs."""
    return tuple(1 << at for at in graph.order if mask >> at & 1)


def _components(mask: int, neighbours: Callable[[int], int]) -> list[int]:
    """The connected parts of a set, in order of their first member."""
    found = []
    while mask:
        part, new = 0, mask & -mask
        while new:
            at = new.bit_length() - 1
            part |= 1 << at
            new = (new | neighbours(at) & mask) & ~part
        found.append(part)
        mask &= ~part
    return found


def item_operators(item: Item) -> int:
    """The set of all operators of one item."""
    return item if isinstance(item, int) else reduce(or_, map(operators, item))


def operators(chain: Chain) -> int:
    """The set of all operators of a chain."""
    return reduce(or_, map(item_operators, chain), 0)


def leaves(chain: Chain) -> tuple[int, ...]:
    """The operators of a chain, each by its position in the graph, in the chain's order."""
    found: list[int] = []
    for item in chain:
        parts = (members(item),) if isinstance(item, int) else map(leaves, item)
        found += (at for part in parts for at in part)
    return tuple(found)
