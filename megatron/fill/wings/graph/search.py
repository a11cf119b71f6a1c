"""The search for a plan: binary search on the time per sample, with a partition of the model for each (section 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import ceil, inf

from megatron.fill.errors import GraphError
from megatron.fill.wings.graph.cost import Cluster, Costs
from megatron.fill.wings.graph.model import ModelGraph, members
from megatron.fill.wings.graph.options import Choice, Options, divisions
from megatron.fill.wings.graph.partition import Partitioner
from megatron.fill.wings.graph.plan import Plan, Stage
from megatron.fill.wings.graph.schedule import group, in_flight
from megatron.fill.wings.graph.timeline import GraphTimeline, simulate
from megatron.fill.wings.graph.tree import Chain, decompose

_FIRST_STEP, _LARGEST_STEP = 0.01, 1.0  # relative growth of the limit until there is a plan
_TOLERANCE = 1e-3
_WIDER = 1.1  # growth factor of the limit while plans with a longer time per sample are compared
_TIMED = 6  # plans that are simulated per limit


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    timeline: GraphTimeline  # timeline of the plan with the shortest iteration that was found
    bottleneck_s: float  # shortest time per sample of any plan, within the tolerance
    steps: int  # number of limits tried
    lined: tuple[tuple[str, ...], ...] = ()  # groups of operators that are not series-parallel and were put into a line

    @property
    def plan(self) -> Plan:
        return self.timeline.plan


def micro_batches(batch: int, count: int | None = None) -> tuple[int, ...]:
    """The microbatch sizes to choose from, in samples; GraphError if the batch is below 1, or no multiple of ``count``.

    Args:
        count: number of microbatches in each stage; None to try every power of two that divides the batch.
    """
    if batch < 1:
        raise GraphError(f"the batch has {batch} samples; expected at least 1")
    if count is None:
        return tuple(1 << at for at in range(batch.bit_length()) if not batch % (1 << at))
    if count < 1 or batch % count:
        raise GraphError(f"{batch} samples in {count} micro-batches; expected a divisor of {batch}")
    return (batch // count,)


def plan_graph(
    graph: ModelGraph, cluster: Cluster, batch: int, sizes: Sequence[int], tolerance: float = _TOLERANCE
) -> Found:
    """Find the graph of stages with the shortest iteration.

    Args:
        batch: samples per iteration.
        sizes: microbatch sizes that stages may have, in samples; divisors of the batch, ascending.
        tolerance: relative tolerance of the shortest time per sample.

    Raises:
        GraphError: no plan fits the devices; the error names what does not.
    """
    chain, lined = decompose(graph)
    found = search_chain(graph, cluster, batch, sizes, chain, tolerance=tolerance)
    return replace(found, lined=tuple(map(graph.names, lined)))


def search_chain(
    graph: ModelGraph,
    cluster: Cluster,
    batch: int,
    sizes: Sequence[int],
    chain: Chain,
    sequential: bool = False,
    tolerance: float = _TOLERANCE,
) -> Found:
    """Plan like ``plan_graph``, for a given chain.

    The smallest limit on the time per sample that has a plan is found, and the best plan at this and larger limits.  An
    iteration takes the batch at the bottleneck's time per sample, plus filling and draining the pipeline.  So a plan
    with a longer time per sample and fewer stages in a row may be faster, and plans are compared by their timelines.

    Args:
        sequential: True if each stage also waits for the one before it.
    """
    costs = Costs(graph, cluster, batch)
    _check_operators(costs, sizes)
    _check_devices(costs)
    options = Options(costs, sizes, inf)
    steps = 0

    def plans(limit_s: float) -> list[Plan]:
        nonlocal steps
        steps += 1
        ways = Partitioner(graph, chain, options.within(limit_s)).entries()
        entries = sorted(ways, key=lambda its: sum(its.need))
        return [build(costs, entry.link.choices(), sequential) for entry in entries[:_TIMED]]

    low_s = _floor(options)
    high_s = low_s * (1 + _FIRST_STEP / 10)
    found = plans(high_s)
    most_s = _ceiling(costs, sizes)
    for step in count():
        if found:
            break
        if high_s >= most_s:
            raise GraphError(
                f"{costs.graph.name}: no plan fits {costs.cluster.devices} devices of"
                f" {costs.cluster.device_bytes / 2**30:.2f} GiB with micro-batches of {', '.join(map(str, sizes))};"
                f" expected more devices, more memory or smaller micro-batches"
            )
        low_s, high_s = high_s, min(most_s, high_s * (1 + min(_LARGEST_STEP, _FIRST_STEP * 1.5**step)))
        found = plans(high_s)
    seen = list(found)
    high_s = min(plan.bottleneck_s for plan in found)
    while high_s > low_s * (1 + tolerance):
        middle_s = (low_s + high_s) / 2
        if better := plans(middle_s):
            seen += better
            high_s = min(middle_s, *(plan.bottleneck_s for plan in better))
        else:
            low_s = middle_s
    high_s = min(plan.bottleneck_s for plan in seen)
    quickest = min(map(simulate, seen), key=_rank)
    limit_s = high_s * _WIDER
    while limit_s * costs.batch * 1e9 < quickest.period_ns and limit_s < most_s:
        quickest = min([quickest, *map(simulate, plans(limit_s))], key=_rank)
        limit_s *= _WIDER
    return Found(quickest, high_s, steps)


def _rank(timeline: GraphTimeline) -> tuple[int, int, int]:
    return timeline.period_ns, timeline.plan.devices, len(timeline.plan.stages)


def build(costs: Costs, choices: Iterable[Choice], sequential: bool = False) -> Plan:
    """Return a plan of these stages, each after those that it depends on; devices are numbered consecutively."""
    graph, chosen = costs.graph, tuple(choices)
    home = {at: number for number, its in enumerate(chosen) for at in members(its.mask)}
    successors: list[set[int]] = [set() for _ in chosen]
    for at, stage in home.items():
        successors[stage] |= {home[to] for to in members(graph.outputs[at])} - {stage}
    if sequential:
        for number in range(len(chosen) - 1):
            successors[number].add(number + 1)
    sizes = [its.micro_batch for its in chosen]
    flying = in_flight([sorted(its) for its in successors], sizes, costs.batch)
    stages, device = [], 0
    for number, its in enumerate(chosen):
        devices = tuple(range(device, device + its.replicas))
        device += its.replicas
        k = group(its.micro_batch, [sizes[to] for to in successors[number]])
        stages.append(Stage(graph.names(its.mask), devices, its.micro_batch, k, flying[number]))
    return Plan(graph, costs.cluster, costs.batch, tuple(stages), sequential)


def _floor(options: Options) -> float:
    """Lower bound on the time per sample: the work shared evenly by all devices, or the longest operator."""
    costs = options.costs
    longest_s = max(
        min(
            sum(costs.passes_s(1 << at, size // replicas)) / size
            for size, replicas in divisions(options.sizes, options.devices)
        )
        for at in range(len(costs.graph.operators))
    )
    floor_s = max(longest_s, options.total / options.devices)
    return floor_s or 1e-12


def _ceiling(costs: Costs, sizes: Sequence[int]) -> float:
    """Upper bound on the time per sample of every stage, in seconds."""
    everything = costs.graph.everything
    passes_s = sum(costs.passes_s(everything, 1))
    reduce_s = costs.cluster.reduce_s(costs.sums(everything)[0], costs.cluster.devices) / costs.batch
    moved = 2 * sum(operator.output_bytes for operator in costs.graph.operators)
    link_s = 0.0
    if costs.cluster.network is not None:
        link_s = moved / costs.cluster.link_bytes_s(costs.cluster.devices)
    return max(passes_s + reduce_s, link_s) * 2


def _check_operators(costs: Costs, sizes: Sequence[int]) -> None:
    """Raise ``GraphError`` if an operator alone does not fit, replicated over any number of the devices."""
    cluster = costs.cluster
    choices = divisions(sizes, cluster.devices)
    for at, operator in enumerate(costs.graph.operators):
        if not any(costs.most_in_flight(1 << at, count) >= size for size, count in choices):
            size, replicas = min(choices, key=lambda its: costs.memory_bytes(1 << at, its[0], its[1]))
            needed, have = costs.memory_bytes(1 << at, size, replicas) / 2**30, cluster.device_bytes / 2**30
            raise GraphError(
                f"{costs.graph.name}: operator {operator.name} fits no device: needs {needed:.2f} GiB even with"
                f" micro-batches of {size} on {replicas} of the devices; they have {have:.2f} GiB"
            )


def _check_devices(costs: Costs) -> None:
    """Raise ``GraphError`` if parameters, gradients and optimizer exceed the memory of all devices together."""
    cluster, graph = costs.cluster, costs.graph
    state = costs.memory_bytes(graph.everything, 0, 1)
    fewest = ceil(state / cluster.device_bytes)
    if fewest > cluster.devices:
        raise GraphError(
            f"{graph.name}: {cluster.devices} devices are too few: parameters, gradients and optimizer take"
            f" {state / 2**30:.1f} GiB; expected at least {fewest} devices of {cluster.device_bytes / 2**30:.2f} GiB"
        )
