"""From a training and a cluster to the configurations worth starting (Pipette, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.dedicate import anneal
from megatron.fill.wings.configure.energy import Energy
from megatron.fill.wings.configure.rows import in_rows
from megatron.fill.wings.configure.search import Evaluator, Proposal, search
from megatron.fill.wings.configure.space import divisors
from megatron.fill.wings.configure.value import Objective, Valued, valued
from megatron.fill.wings.sim.values import FillKind

_POOL = 4  # times as many rows are valued as are asked for


@dataclass(frozen=True, slots=True)
class Choice:
    """The best configurations, in rows as ``search.Found`` has them, which explains the counts."""

    rows: tuple[tuple[Valued, ...], ...]
    configurations: int
    timed: int

    @property
    def best(self) -> list[Valued]:
        """The first of each row."""
        return [row[0] for row in self.rows]


def choose(
    whole: Evaluator, kinds: Sequence[FillKind], objective: Objective, top: int, seed: int, moves: int, error: float
) -> Choice:
    """Return the best configurations of a training on a whole cluster by an objective.

    On a measured network the ranks of each row are put where the iteration of its first is shortest; its order is
    searched for the rows that are best in the cluster's own order.  *combined* and *cost* choose among the first
    ``4 * top`` rows of each number of nodes.

    Args:
        seed: seed of the annealing; ``moves`` is the number of moves tried for a configuration.
        error: as ``search`` has it.

    Raises:
        ConfigError: nothing fits; the message names what excludes all.
    """
    most = whole.cluster.nodes
    sizes = divisors(most)[::-1] if objective is Objective.COST else [most]
    main = objective is Objective.MAIN
    pool = top if main else _POOL * top
    rows: list[tuple[Valued, ...]] = []
    configurations = timed = 0
    problem: ConfigError | None = None
    for nodes in sizes:
        try:
            evaluator = whole if nodes == most else whole.first(nodes)
            its = search(evaluator, pool, error)
        except ConfigError as refused:
            problem = problem or refused
            continue
        configurations += its.configurations
        timed += its.timed
        found: Sequence[tuple[Proposal, ...]] = its.rows
        if whole.cluster.measured is not None:
            placed = [one for row in found for one in dedicated(evaluator, row, seed, moves)]
            found = in_rows(placed, error, whole.cluster.gpus_per_node)
        rows += (tuple(valued(one, kinds) for one in row) for row in found)
    if not rows:
        assert problem is not None
        raise problem
    if not main:
        rows = sorted((_by_net(row, error) for row in rows), key=lambda row: row[0].net_gpu_s)
    return Choice(tuple(rows[:top]), configurations, timed)


def _by_net(row: Sequence[Valued], error: float) -> tuple[Valued, ...]:
    """Return a row with the one of least net GPU time first, and those that tie with it."""
    ordered = sorted(row, key=lambda one: one.net_gpu_s)
    return tuple(one for one in ordered if one.net_gpu_s <= (1 + error) * ordered[0].net_gpu_s)


def dedicated(evaluator: Evaluator, row: Sequence[Proposal], seed: int, moves: int) -> list[Proposal]:
    """With its ranks where annealing puts those of its first: each in its best order by the timeline, or as it was."""
    its, cluster = row[0].parallel, evaluator.cluster
    energy = Energy(evaluator.models[its.tp], cluster.gpu, cluster.efficiency, its, evaluator.links, evaluator.passes)
    orders = anneal(energy, its, cluster.gpus_per_node, seed, moves).orders
    placed = []
    for one in row:
        found = (evaluator.proposal(evaluator.iteration(one.parallel, order), order) for order in orders)
        placed.append(min(filter(None, (one, *found)), key=lambda its: its.timeline.period_ns))
    return placed
