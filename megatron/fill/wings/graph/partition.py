"""Stages for a model within a limit on the time per sample: dynamic programming over its series-parallel structure.

A chain is taken apart from its end.  Its last stage takes the last item, and any operators before it that only lead
there: whole items, and ends of the branches of a block.  If a chain ends in branches, these are planned separately, or
several whole ones form one stage; the stage before them may also take beginnings of branches.  The candidate stages are
thus all connected convex sets of operators, and all sets of whole branches of a block.

The stages downstream matter only through their *need*: the samples in flight in a stage upstream, per microbatch size
that this stage may have.  All branches of a block have the same stages downstream and so the same need; the need that a
block leaves upstream is the largest of its branches' needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, product
from math import prod

from megatron.fill.wings.graph.model import ModelGraph, members
from megatron.fill.wings.graph.options import Entry, Link, Options, best
from megatron.fill.wings.graph.tree import Chain, Item, item_operators, leaves, operators

type Need = tuple[int, ...]
type Cut = tuple[int, Chain]  # the operators of one end of a chain, and the rest of it

_MOST_GROUPS = 4096  # all sets of branches of a block are tried as one stage up to this number of sets


class Partitioner:
    """All best ways to cut a chain, the whole model, into stages, within the limit of ``options``."""

    def __init__(self, graph: ModelGraph, chain: Chain, options: Options) -> None:
        self._graph = graph
        self._options = options
        self._chain = chain
        self._memo: dict[tuple[Chain, Need], tuple[Entry, ...]] = {}
        self._blocks: dict[tuple[tuple[Chain, ...], Need], tuple[Entry, ...]] = {}
        self._ends: dict[tuple[Chain, bool], tuple[Cut, ...]] = {}
        self._alike: dict[object, Chain] = {}
        self._kinds: dict[Chain, Chain] = {}
        self._block_of = dict(_branches(chain))

    def entries(self) -> tuple[Entry, ...]:
        """Return every way that no other one matches in devices and needs; empty if nothing fits."""
        if self._options.fewest(operators(self._chain)) > self._options.devices:
            return ()
        return self._solve(self._chain, self._options.first)

    def _solve(self, chain: Chain, need: Need) -> tuple[Entry, ...]:
        if not chain:
            return (Entry(0, need, Link(None)),)
        key = chain, need
        if key not in self._memo:
            self._memo[key] = best(self._ways(chain, need))
        return self._memo[key]

    def _ways(self, chain: Chain, need: Need) -> Iterator[Entry]:
        options = self._options
        room = options.room(operators(chain))
        if options.fewest(operators(chain)) > room:
            return
        starts: list[tuple[int, Chain, tuple[Entry, ...]]] = [(0, chain, (Entry(0, need, Link(None)),))]
        last = chain[-1]
        if not isinstance(last, int):
            for block in self._block(last, need):
                yield from self._joined(self._solve(chain[:-1], block.need), block, room)
            if len(chain) > 1:
                for taken, rest in self._cuts(last, forward=True):
                    if options.fits(taken, room):
                        starts.append((taken, chain[:-1], self._solve(rest, need)))
        for taken, items, rights in starts:
            if not rights:
                continue
            for more, rest in self._some(items, forward=False) if taken else self._end(items):
                mask = taken | more
                if not options.fits(mask, room) or (rest == chain[:-1] and not self._holds_together(last)):
                    continue
                for right in rights:
                    spare = room - right.devices - options.fewest(operators(rest))
                    for stage in options.stages(mask, right.need, spare):
                        link = Link(None, (stage.link, right.link)) if right.devices else stage.link
                        lower = Entry(stage.devices + right.devices, stage.need, link)
                        yield from self._joined(self._solve(rest, stage.need), lower, room)

    def _holds_together(self, item: Item) -> bool:
        """True if the item alone may be a stage: an operator, or whole branches of a block."""
        if isinstance(item, int):
            return True
        blocks = {self._block_of.get(branch) for branch in item}
        return len(blocks) == 1 and None not in blocks

    @staticmethod
    def _joined(upper: tuple[Entry, ...], lower: Entry, room: int) -> Iterator[Entry]:
        for entry in upper:
            if entry.devices + lower.devices <= room:
                link = Link(None, (entry.link, lower.link)) if entry.devices else lower.link
                yield Entry(entry.devices + lower.devices, entry.need, link)

    def _end(self, items: Chain) -> Iterator[Cut]:
        """Yield the operators of each last stage that contains the last item, with the rest of the chain."""
        last = item_operators(items[-1])
        yield last, items[:-1]
        for more, rest in self._some(items[:-1], forward=False):
            yield last | more, rest

    def _some(self, chain: Chain, forward: bool) -> tuple[Cut, ...]:
        """Return every nonempty beginning of a chain (``forward``), or every nonempty end, with the rest."""
        key = chain, forward
        if key not in self._ends:
            self._ends[key] = tuple(self._parts(chain, forward))
        return self._ends[key]

    def _parts(self, chain: Chain, forward: bool) -> Iterator[Cut]:
        taken = 0
        for count in range(len(chain)):
            item = chain[count] if forward else chain[-1 - count]
            rest = chain[count + 1 :] if forward else chain[: len(chain) - 1 - count]
            if not isinstance(item, int):
                for mask, left in self._cuts(item, forward):
                    yield taken | mask, (*left, *rest) if forward else (*rest, *left)
            taken |= item_operators(item)
            if not self._options.fits(taken, self._options.devices):
                return
            yield taken, rest

    def _cuts(self, block: tuple[Chain, ...], forward: bool) -> Iterator[Cut]:
        """Yield ends or beginnings of a block's branches, neither empty nor the whole block.

        Like branches are interchangeable, so only one order of their cuts is tried.
        """
        everything = item_operators(block)
        kinds = self._by_kind(block)
        ways = []
        for same in kinds.values():
            counts = range(1 + len(self._some(same[0], forward)))
            ways.append(combinations_with_replacement(counts, len(same)))
        for vector in product(*ways):
            mask, left = 0, []
            for same, positions in zip(kinds.values(), vector, strict=True):
                for branch, position in zip(same, positions, strict=True):
                    part, rest = self._some(branch, forward)[position - 1] if position else (0, branch)
                    mask |= part
                    if rest:
                        left.append(rest)
            if mask not in (0, everything) and self._options.fits(mask, self._options.devices):
                yield mask, left[0] if len(left) == 1 else (tuple(left),)

    def _block(self, block: tuple[Chain, ...], need: Need) -> tuple[Entry, ...]:
        """Return the best ways to run all branches of a block side by side."""
        key = block, need
        if key not in self._blocks:
            self._blocks[key] = self._side_by_side(block, need)
        return self._blocks[key]

    def _side_by_side(self, block: tuple[Chain, ...], need: Need) -> tuple[Entry, ...]:
        kinds = list(self._by_kind(block).values())
        whole = [self._block_of.get(same[0]) for same in kinds]
        all_groups = prod(len(same) + 1 for same in kinds) <= _MOST_GROUPS
        room = self._options.room(item_operators(block))
        memo: dict[tuple[int, ...], tuple[Entry, ...]] = {}

        def solve(counts: tuple[int, ...]) -> tuple[Entry, ...]:
            """Plan the last ``counts[i]`` branches of each kind ``i``."""
            if not any(counts):
                return (Entry(0, (0,) * len(need), Link(None)),)
            if counts not in memo:
                memo[counts] = best(ways(counts))
            return memo[counts]

        def ways(counts: tuple[int, ...]) -> Iterator[Entry]:
            first = next(at for at, count in enumerate(counts) if count)
            branch = kinds[first][-counts[first]]
            singles = self._moved(branch, need)
            yield from beside(singles, _less(counts, first))
            if whole[first] is None:
                return
            others = [
                range(count + 1 if at > first and whole[at] == whole[first] and all_groups else 1)
                for at, count in enumerate(counts)
            ]
            others[first] = range(counts[first])
            for vector in product(*others):
                if not any(vector):
                    continue
                mask, left = operators(branch), _less(counts, first)
                for at, count in enumerate(vector):
                    for _ in range(count):
                        mask |= operators(kinds[at][-left[at]])
                        left = _less(left, at)
                if self._options.fits(mask, room):
                    yield from beside(self._options.stages(mask, need, room), left)

        def beside(entries: tuple[Entry, ...], left: tuple[int, ...]) -> Iterator[Entry]:
            for entry, other in product(entries, solve(left) if entries else ()):
                if entry.devices + other.devices <= room:
                    larger = tuple([max(a, b) for a, b in zip(entry.need, other.need, strict=True)])
                    link = Link(None, (entry.link, other.link)) if other.devices else entry.link
                    yield Entry(entry.devices + other.devices, larger, link)

        return solve(tuple(len(same) for same in kinds))

    def _moved(self, branch: Chain, need: Need) -> tuple[Entry, ...]:
        """Return a branch's entries, planned once for all like branches and mapped to this one's operators."""
        kind = self._kind(branch)
        found = self._solve(kind, need)
        if kind == branch:
            return found
        moved = leaves(kind), leaves(branch)
        return tuple(entry._replace(link=Link(None, (entry.link,), moved)) for entry in found)

    def _by_kind(self, block: tuple[Chain, ...]) -> dict[Chain, list[Chain]]:
        found: dict[Chain, list[Chain]] = {}
        for branch in block:
            found.setdefault(self._kind(branch), []).append(branch)
        return found

    def _kind(self, branch: Chain) -> Chain:
        """Return the first branch like this one: of the same shape, costs, inputs and exits."""
        if branch not in self._kinds:
            graph, order = self._graph, leaves(branch)
            place = {at: number for number, at in enumerate(order)}
            parts: list[object] = [_shape(branch), self._block_of.get(branch)]
            for at in order:
                its = graph.operators[at]
                costs = (its.forward_flops, its.backward_flops, its.forward_s, its.backward_s, its.parameters)
                traffic = (its.lookup, its.moved_bytes, its.output_bytes, its.kept_bytes, its.frozen)
                taken = [
                    (place.get(source, -1), graph.operators[source].output_bytes)
                    for source in members(graph.inputs[at])
                ]
                leads = any(target not in place for target in members(graph.outputs[at]))
                parts.append((costs, traffic, tuple(sorted(taken)), leads))
            self._kinds[branch] = self._alike.setdefault(tuple(parts), branch)
        return self._kinds[branch]


def _less(counts: tuple[int, ...], at: int) -> tuple[int, ...]:
    return (*counts[:at], counts[at] - 1, *counts[at + 1 :])


def _shape(chain: Chain) -> object:
    return tuple(item.bit_count() if isinstance(item, int) else tuple(map(_shape, item)) for item in chain)


def _branches(chain: Chain) -> Iterator[tuple[Chain, int]]:
    """Yield every branch with the operators of its block."""
    for item in chain:
        if not isinstance(item, int):
            for branch in item:
                yield branch, item_operators(item)
                yield from _branches(branch)
