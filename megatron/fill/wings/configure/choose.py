"""From a training and a cluster to the configurations worth starting (Pipette, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fill.errors import ConfigError
from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.correction import Correction
from megatron.fill.wings.configure.dedicate import anneal
from megatron.fill.wings.configure.energy import Energy
from megatron.fill.wings.configure.flags import Training
from megatron.fill.wings.configure.links import Links
from megatron.fill.wings.configure.passes import Passes
from megatron.fill.wings.configure.search import Evaluator, Proposal, search
from megatron.fill.wings.configure.space import divisors, padded
from megatron.fill.wings.configure.value import Objective, Valued, valued
from megatron.fill.wings.sim.values import FillKind

_POOL = 4  # times as many of the fastest are valued as are asked for


@dataclass(frozen=True, slots=True)
class Choice:
    """The best configurations, and how many there were; ``search.Found`` explains the counts."""

    best: tuple[Valued, ...]
    configurations: int
    timed: int


def choose(
    training: Training,
    cluster: Cluster,
    links: Links,
    kinds: Sequence[FillKind],
    objective: Objective,
    top: int,
    seed: int = 0,
    moves: int = 3000,
    passes: Passes | None = None,
    correction: Correction | None = None,
    error: float = 0.0,
) -> Choice:
    """Return the best configuration by an objective.

    On a measured network the ranks of each are put where the iteration is shortest; its order is searched for the
    configurations that are best in the cluster's own order.  *combined* and *cost* choose among the fastest
    ``4 * top`` of each number of nodes.

    Args:
        seed: seed of the annealing; ``moves`` is the number of moves tried for a configuration.
        passes: measured passes; None for the analytic model.
        correction: learned correction of the memory estimates.
        error: by *main*, as ``search`` has it.

    Raises:
        ConfigError: nothing fits; the message names what excludes all.
    """
    sizes = [cluster.nodes]
    if objective is Objective.COST:
        sizes = divisors(cluster.nodes)[::-1]
    main = objective is Objective.MAIN
    pool = top if main else _POOL * top
    found: list[Valued] = []
    configurations = timed = 0
    problem: ConfigError | None = None
    for nodes in sizes:
        gpus = nodes * cluster.gpus_per_node
        there = links if nodes == cluster.nodes else links.first(gpus)
        try:
            its = search(training, cluster, there, pool, gpus, passes, correction, error if main else 0.0)
        except ConfigError as refused:
            problem = problem or refused
            continue
        configurations += its.configurations
        timed += its.timed
        evaluator = Evaluator(training, cluster, there, passes, correction)
        for one in its.proposals:
            placed = one if cluster.measured is None else dedicated(evaluator, one, seed, moves)
            found.append(valued(placed, kinds))
    if not found:
        assert problem is not None
        raise problem
    if not main:
        found.sort(key=lambda one: one.net_gpu_s)
    elif cluster.measured is not None:
        found.sort(key=lambda one: one.proposal.iteration_s)
    return Choice(tuple(found[:top]), configurations, timed)


def dedicated(evaluator: Evaluator, proposal: Proposal, seed: int, moves: int) -> Proposal:
    """With its ranks where annealing puts them: its best order by the timeline, or as it was."""
    its, cluster = proposal.parallel, evaluator.cluster
    model = padded(evaluator.training, its.tp)
    energy = Energy(model, cluster.gpu, cluster.efficiency, its, evaluator.links, evaluator.passes)
    orders = anneal(energy, its, cluster.gpus_per_node, seed, moves).orders
    found = (evaluator.proposal(evaluator.iteration(its, order), order) for order in orders)
    return min(filter(None, (proposal, *found)), key=lambda one: one.timeline.period_ns)
