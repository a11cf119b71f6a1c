"""Random series-parallel models, and the least time per sample of small ones by trying everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from random import Random

from megatron.fill.wings.graph.cost import Cluster, Costs
from megatron.fill.wings.graph.model import ModelGraph, Operator, members
from megatron.fill.wings.graph.schedule import in_flight
from megatron.fill.wings.mainjob.hardware import GPUS, NETWORKS


def random_model(random: Random, operators: int) -> ModelGraph:
    """A series-parallel model with random costs."""
    edges: list[tuple[int, int]] = []

    def compose(first: int, count: int) -> tuple[list[int], list[int]]:
        """Operators from a number on, put together: which of them are at its beginning, and which at its end."""
        if count == 1:
            return [first], [first]
        cut = random.randint(1, count - 1)
        begins, ends = compose(first, cut)
        more_begins, more_ends = compose(first + cut, count - cut)
        if random.random() < 0.5:
            return begins + more_begins, ends + more_ends
        if (
            len(ends) > 1 and len(more_begins) > 1 and random.random() < 0.8
        ):  # joins and forks of one operator are usual
            return begins + more_begins, ends + more_ends
        edges.extend((source, target) for source in ends for target in more_begins)
        return begins, more_ends

    compose(0, operators)
    inputs: list[list[str]] = [[] for _ in range(operators)]
    for source, target in edges:
        inputs[target].append(f"op{source}")
    return ModelGraph(
        "random",
        tuple(
            Operator(
                name=f"op{at}",
                inputs=tuple(inputs[at]),
                forward_s=random.choice((1, 1, 2, 3, 5, 8)) * 1e-3,
                backward_s=random.choice((1, 2, 4, 9)) * 1e-3,
                parameters=random.choice((0, 1000, 20_000)),
                output_bytes=random.choice((100, 2000)),
                kept_bytes=random.choice((100, 5000, 20_000)),
            )
            for at in range(operators)
        ),
    )


def random_cluster(random: Random, devices: int) -> Cluster:
    """Devices with memory that is enough, or only just."""
    return Cluster(
        devices=devices,
        gpu=GPUS["v100-16gb"],
        network=random.choice((None, NETWORKS["pcie4"])),
        memory_bytes=random.choice((10**9, 1_500_000, 800_000)),
    )


def least_bottleneck_s(graph: ModelGraph, cluster: Cluster, batch: int, sizes: Sequence[int]) -> float | None:
    """The least time per sample of a stage that any plan can have; None if none is valid.

    A stage is any connected convex set of operators, or any whole branches of a block; with any of the micro-batches on
    any number of devices.
    """
    costs = Costs(graph, cluster, batch)
    least_s = inf
    for masks in _partitions(graph, cluster.devices):
        order = _ordered(graph, masks)
        while order is not None:
            better = next(
                (
                    its
                    for its in _assignments(costs, sizes, order, cluster.devices, least_s)
                    if _fits(costs, order, its)
                ),
                None,
            )
            if better is None:
                break
            least_s = max(costs.time_per_sample_s(mask, *its) for mask, its in zip(order, better, strict=True))
    return None if least_s == inf else least_s


def _partitions(graph: ModelGraph, most: int) -> Iterator[list[int]]:
    """All ways to put the operators into at most so many stages."""
    count = len(graph.operators)
    allowed: dict[int, bool] = {}

    def extend(at: int, masks: list[int]) -> Iterator[list[int]]:
        if at == count:
            for mask in masks:
                if mask not in allowed:
                    allowed[mask] = _may_be_stage(graph, mask)
            if all(allowed[mask] for mask in masks):
                yield list(masks)
            return
        for number in range(len(masks)):
            masks[number] |= 1 << at
            yield from extend(at + 1, masks)
            masks[number] ^= 1 << at
        if len(masks) < most:
            yield from extend(at + 1, [*masks, 1 << at])

    return extend(0, [])


def _may_be_stage(graph: ModelGraph, mask: int) -> bool:
    before, after = _around(graph, mask)
    if before & after:
        return False  # not convex
    parts = _connected(graph, mask)
    if len(parts) == 1:
        return True
    around = {_around(graph, part) for part in parts}
    if len(around) > 1:
        return False
    before, after = around.pop()
    block = 0
    for at in members(graph.everything & ~before & ~after):
        if not before & ~graph.before[at] and not after & ~graph.after[at]:
            block |= 1 << at
    return set(parts) <= set(_connected(graph, block))


def _around(graph: ModelGraph, mask: int) -> tuple[int, int]:
    """What a set depends on, and what depends on it."""
    before = after = 0
    for at in members(mask):
        before |= graph.before[at]
        after |= graph.after[at]
    return before & ~mask, after & ~mask


def _connected(graph: ModelGraph, mask: int) -> list[int]:
    """Return the connected parts of a set, without the planner's own search for them, which this is to check."""
    found = []
    while mask:
        part, new = 0, mask & -mask
        while new:
            at = new.bit_length() - 1
            part |= 1 << at
            new = (new | (graph.inputs[at] | graph.outputs[at]) & mask) & ~part
        found.append(part)
        mask &= ~part
    return found


def _ordered(graph: ModelGraph, masks: list[int]) -> list[int] | None:
    """Each stage after those that it depends on; None if there is a cycle."""
    needs = [_around(graph, mask)[0] for mask in masks]
    found: list[int] = []
    done = 0
    while len(found) < len(masks):
        ready = [mask for mask, need in zip(masks, needs, strict=True) if not mask & done and not need & ~done]
        if not ready:
            return None
        for mask in ready:
            found.append(mask)
            done |= mask
    return found


def _assignments(
    costs: Costs, sizes: Sequence[int], masks: list[int], devices: int, limit_s: float
) -> Iterator[list[tuple[int, int]]]:
    """Micro-batches and devices of all stages, each with less than so much time per sample."""
    if not masks:
        yield []
        return
    for count in range(1, devices - len(masks) + 2):
        for size in sizes:
            if size % count == 0 and costs.time_per_sample_s(masks[0], size, count) < limit_s:
                for rest in _assignments(costs, sizes, masks[1:], devices - count, limit_s):
                    yield [(size, count), *rest]


def _fits(costs: Costs, masks: list[int], choice: list[tuple[int, int]]) -> bool:
    graph = costs.graph
    outputs = [0] * len(masks)
    for number, mask in enumerate(masks):
        for at in members(mask):
            outputs[number] |= graph.outputs[at] & ~mask
    successors = [[to for to, other in enumerate(masks) if other & output] for output in outputs]
    flying = in_flight(successors, [size for size, _ in choice], costs.batch)
    return all(
        costs.memory_bytes(mask, samples, count) <= costs.cluster.device_bytes
        for mask, samples, (_, count) in zip(masks, flying, choice, strict=True)
    )
