"""Baseline planners, with the same costs, limits and timelines.

A *sequential* pipeline is a chain of stages: each waits for the one before it even if no operator needs to.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.fill.wings.graph.cost import Cluster, Costs
from megatron.fill.wings.graph.model import ModelGraph, members
from megatron.fill.wings.graph.options import Choice, divisions
from megatron.fill.wings.graph.search import Found, build, search_chain
from megatron.fill.wings.graph.timeline import GraphTimeline, simulate
from megatron.fill.wings.graph.tree import line


def plan_sequential(graph: ModelGraph, cluster: Cluster, batch: int, sizes: Sequence[int]) -> Found:
    """Plan a sequential pipeline over the operators in a line, branch after branch (PipeDream, Narayanan et al. 2019).

    Errors are those of ``plan_graph``.
    """
    return search_chain(graph, cluster, batch, sizes, line(graph, graph.everything), sequential=True)


def plan_data_parallel(graph: ModelGraph, cluster: Cluster, batch: int, sizes: Sequence[int]) -> GraphTimeline | None:
    """Time the whole model as one stage, replicated over the devices; None if it does not fit."""
    costs, everything = Costs(graph, cluster, batch), graph.everything
    timelines = []
    for size, replicas in dict(divisions(sizes, cluster.devices)).items():  # the most replicas of each size
        if costs.most_in_flight(everything, replicas) >= size:
            timelines.append(simulate(build(costs, [Choice(everything, size, replicas)])))
    return min(timelines, key=lambda its: its.period_ns, default=None)


def plan_atomic(graph: ModelGraph, cluster: Cluster, batch: int, sizes: Sequence[int]) -> Found:
    """Plan a sequential pipeline in which the operators at the same depth of the model are merged into one.

    This concatenates the branches, layer by layer, into a chain.  Errors are those of ``plan_graph``.
    """
    depths: dict[int, int] = {}
    for at in graph.order:
        depths[at] = 1 + max((depths[source] for source in members(graph.inputs[at])), default=-1)
    levels = [0] * (1 + max(depths.values()))
    for at, depth in depths.items():
        levels[depth] |= 1 << at
    return search_chain(graph, cluster, batch, sizes, tuple(levels), sequential=True)
