"""Links that a layout's groups use, once its logical ranks are on physical ones.

Ranks are numbered as Megatron does (``tp-cp-ep-dp-pp``): tensor-parallel ranks next to each other, then the replicas,
context-parallel ones next to each other, then stages.  Experts number the same ranks anew: tensor-parallel ranks of an
expert next to each other, then the expert-parallel ones, then those that have the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.fill.wings.configure.links import Edge, Links, Route
from megatron.fill.wings.mainjob.parallel import Parallel


@dataclass(frozen=True, slots=True)
class StageRoutes:
    """Routes of the groups of one stage; all groups of a kind exchange at once."""

    tensor: Route
    context: Route
    experts: tuple[Route, ...]  # per distance in the group
    replicas: Route
    expert_replicas: Route
    spread: Spread


@dataclass(frozen=True, slots=True)
class Spread:
    """The nodes of a group of ranks with different experts."""

    nodes: int  # number of nodes that a group is on, the most of all groups
    ranks: int  # number of its ranks on one of them, the most
    between: Route  # route from each rank of a group to a rank of the same place on the group's next node
    within: Route  # route between the group's ranks of a node, in a ring


@dataclass(frozen=True, slots=True)
class Layout:
    """A rank order's links."""

    stages: tuple[StageRoutes, ...]
    # the data-parallel replicas whose links differ: per stage, to the next stage (from the last to the first, for
    # chunks) and from there back
    replicas: tuple[tuple[tuple[Route, Route], ...], ...]
    ends: Route  # between the first and the last stage, for a tied embedding
    rendezvous: bool = False  # as of ``Links``


@dataclass(slots=True)
class Known:
    """Routes that were looked up, by the physical ranks of one stage and of two."""

    stages: dict[object, StageRoutes] = field(default_factory=dict)
    boundaries: dict[object, tuple[tuple[Route, Route], ...]] = field(default_factory=dict)


def lay_out(links: Links, its: Parallel, order: Sequence[int] | None = None, known: Known | None = None) -> Layout:
    """The links that are used.

    Args:
        order: the physical rank of each logical one; None for the same.
        known: routes of other orders of the same configuration, to which those of this one are added.
    """
    size = its.tp * its.replicas
    ranks = range(its.gpus) if order is None else order
    stages = [tuple(ranks[stage * size : (stage + 1) * size]) for stage in range(its.pp)]
    known = known or Known()
    # where the network repeats itself, a stage or two have the links of those before them
    repeats = order is None and links.period
    keys: list[object] = [stage[0] % links.period if repeats else stage for stage in stages]
    for key, stage in zip(keys, stages, strict=True):
        if key not in known.stages:
            known.stages[key] = stage_routes(links, its, stage)
    boundaries = []
    for here in range(its.pp if its.pp > 1 else 0):
        there = (here + 1) % its.pp
        both = keys[here], keys[there], there == 0
        if both not in known.boundaries:
            known.boundaries[both] = both_ways(links, its, stages[here], stages[there])
        boundaries.append(known.boundaries[both])
    ends = links.ring(zip(stages[0], stages[-1], strict=True)) if its.pp > 1 else Route()
    replicas = tuple(dict.fromkeys(zip(*boundaries, strict=True))) or ((),)
    return Layout(tuple(known.stages[key] for key in keys), replicas, ends, links.rendezvous)


def replicas_last(its: Parallel) -> list[int]:
    """Return the order in which Megatron numbers ranks with --use-tp-pp-dp-mapping (``tp-cp-ep-pp-dp``)."""
    near = its.tp * its.cp
    firsts = (near * (stage + its.pp * replica) for stage in range(its.pp) for replica in range(its.dp))
    return [first + rank for first in firsts for rank in range(near)]


def stage_routes(links: Links, its: Parallel, ranks: Sequence[int]) -> StageRoutes:
    """Return the routes of one stage's physical ranks, given in logical order."""
    rows = [ranks[replica * its.tp : (replica + 1) * its.tp] for replica in range(its.replicas)]
    contexts = [
        [row[tensor] for row in rows[first : first + its.cp]]
        for first in range(0, its.replicas, its.cp)
        for tensor in range(its.tp)
    ]
    columns = [[row[tensor] for row in rows] for tensor in range(its.tp)]
    width, share = its.expert_width, its.expert_width * its.ep  # ranks of an expert, and of all experts
    experts = [
        ranks[first + at : first + share : width] for first in range(0, len(ranks), share) for at in range(width)
    ]
    return StageRoutes(
        links.ring(rows),
        links.ring(contexts),
        tuple(
            links.route((group[at], group[(at + distance) % its.ep]) for group in experts for at in range(its.ep))
            for distance in range(1, its.ep)
        ),
        links.ring(columns),
        links.ring([ranks[first::share] for first in range(share)]) if its.has_expert_groups else Route(),
        spread(links, experts),
    )


def spread(links: Links, groups: Sequence[Sequence[int]]) -> Spread:
    """Return the nodes of groups of ranks, all of which send at once."""
    parts: list[Sequence[int]] = []
    between: list[Edge] = []
    most = 1
    for group in groups:
        nodes: dict[int, list[int]] = {}
        for rank in group:
            nodes.setdefault(links.nodes[rank], []).append(rank)
        own = list(nodes.values())
        parts += own
        most = max(most, len(own))
        if len(own) > 1:
            following = zip(own, [*own[1:], own[0]], strict=True)
            between += [(rank, there[at % len(there)]) for here, there in following for at, rank in enumerate(here)]
    return Spread(most, max(map(len, parts), default=1), links.route(between), links.ring(parts))


def both_ways(
    links: Links, its: Parallel, here: Sequence[int], there: Sequence[int]
) -> tuple[tuple[Route, Route], ...]:
    """From one stage to another and back: of each data-parallel replica; all of them send at once."""
    share = its.tp * its.cp
    parts = [list(zip(here[at : at + share], there[at : at + share], strict=True)) for at in range(0, len(here), share)]
    turned = [[(receiver, sender) for sender, receiver in part] for part in parts]
    return tuple(zip(links.routes(parts), links.routes(turned), strict=True))
