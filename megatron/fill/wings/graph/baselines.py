"""Baseline planners, with the same costs, limits and timelines.

A *sequential* pipeline is a chain of stages: each waits for the one before it even if no operator needs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.fill.wings.graph.cost import Cluster, Costs
from megatron.fill.wings.graph.model import ModelGraph, members
from megatron.fill.wings.graph.options import Choice, Entry, Link, Options, best
from megatron.fill.wings.graph.search import Found, build, search, search_chain
from megatron.fill.wings.graph.timeline import GraphTimeline, simulate
from megatron.fill.wings.graph.tree import line


def plan_sequential(graph: ModelGraph, cluster: Cluster, batch: int, sizes: Sequence[int]) -> Found:
    """Plan a sequential pipeline over the operators in a line, branch after branch (PipeDream, Narayanan et al. 2019).

    Raises:
        GraphError: as ``plan_graph``.
    """
    return search_chain(graph, cluster, batch, sizes, line(graph, graph.everything), sequential=True)


def plan_data_parallel(graph: ModelGraph, cluster: Cluster, batch: int, sizes: Sequence[int]) -> GraphTimeline | None:
    """Time the whole model as one stage, replicated over the devices; None if it does not fit."""
    costs, everything = Costs(graph, cluster, batch), graph.everything
    timelines = []
    for size in sizes:
        replicas = max(count for count in range(1, min(size, cluster.devices) + 1) if size % count == 0)
        if costs.most_in_flight(everything, replicas) >= size:
            timelines.append(simulate(build(costs, [Choice(everything, size, replicas)])))
    return min(timelines, key=lambda its: its.period_ns, default=None)


def plan_atomic(graph: ModelGraph, cluster: Cluster, batch: int, sizes: Sequence[int]) -> Found:
    """Plan a sequential pipeline in which the operators at the same depth of the model are merged into one.

    This concatenates the branches, layer by layer, into a chain.

    Raises:
        GraphError: as ``plan_graph``.
    """
    depths: dict[int, int] = {}
    for at in graph.order:
        depths[at] = 1 + max((depths[source] for source in members(graph.inputs[at])), default=-1)
    levels = [0] * (1 + max(depths.values()))
    for at, depth in depths.items():
        levels[depth] |= 1 << at
    return search_chain(graph, cluster, batch, sizes, tuple(levels), sequential=True)


def plan_exhaustive(graph: ModelGraph, cluster: Cluster, batch: int, sizes: Sequence[int]) -> Found:
    """Plan a sequential pipeline over the best line of operators (Piper, Tarnawski et al. 2021).

    A stage is the difference of two sets of operators, each of which contains all inputs of its members; all such
    stages are tried.

    Raises:
        GraphError: as ``plan_graph``.
    """
    costs = Costs(graph, cluster, batch)
    return search(costs, sizes, lambda options: _Exhaustive(graph, options).entries(), sequential=True)


class _Exhaustive:
    """All best sequences of stages within the limit of ``options``, from the last stage to the first."""

    def __init__(self, graph: ModelGraph, options: Options) -> None:
        self._graph = graph
        self._options = options
        self._memo: dict[tuple[int, tuple[int, ...]], tuple[Entry, ...]] = {}
        self._ends: dict[int, tuple[int, ...]] = {}

    def entries(self) -> tuple[Entry, ...]:
        return self._solve(self._graph.everything, self._options.first)

    def _solve(self, closed: int, need: tuple[int, ...]) -> tuple[Entry, ...]:
        """Return the best entries for a set of operators that contains all inputs of its members."""
        if not closed:
            return (Entry(0, need, Link(None)),)
        key = closed, need
        if key not in self._memo:
            self._memo[key] = best(self._ways(closed, need))
        return self._memo[key]

    def _ways(self, closed: int, need: tuple[int, ...]) -> Iterator[Entry]:
        options = self._options
        room = options.room(closed)
        if options.fewest(closed) > room:
            return
        for end in self._last(closed):
            spare = room - options.fewest(closed & ~end)
            for stage in options.stages(end, need, spare):
                for upper in self._solve(closed & ~end, stage.need):
                    if upper.devices + stage.devices <= room:
                        link = Link(None, (upper.link, stage.link))
                        yield Entry(upper.devices + stage.devices, upper.need, link)

    def _last(self, closed: int) -> tuple[int, ...]:
        """Return every candidate for the last stage: the sets that contain everything that depends on their members."""
        if closed not in self._ends:
            found: list[int] = []
            seen = {0}
            stack = [0]
            while stack:
                end = stack.pop()
                for at in members(closed & ~end):
                    more = end | 1 << at
                    ready = not self._graph.outputs[at] & closed & ~end
                    if ready and more not in seen and self._options.fits(more, self._options.devices):
                        seen.add(more)
                        found.append(more)
                        stack.append(more)
            self._ends[closed] = tuple(found)
        return self._ends[closed]
