"""Coarsening: merge small neighbouring operators of a graph."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.fill.wings.graph.model import ModelGraph, Operator, members
from megatron.fill.wings.graph.tree import Chain, decompose, item_operators


def coarsen(graph: ModelGraph, share: float) -> ModelGraph:
    """Merge neighbours in series, and whole blocks of branches, up to ``share`` of the model's work per operator.

    An operator's work is its floating-point operations plus its bytes of output.  A merged operator has the name of its
    largest member.
    """
    weights = [its.forward_flops + its.output_bytes for its in graph.operators]
    most = share * sum(weights)

    def weight(mask: int) -> float:
        return sum(weights[at] for at in members(mask))

    def groups(chain: Chain) -> Iterator[int]:
        grown = 0
        for item in chain:
            mask = item_operators(item)
            if grown and weight(grown | mask) <= most:
                grown |= mask
                continue
            if grown:
                yield grown
            grown = 0
            if isinstance(item, int) or weight(mask) <= most:
                grown = mask
            else:
                for branch in item:
                    yield from groups(branch)
        if grown:
            yield grown

    chain, _ = decompose(graph)
    masks = list(groups(chain))
    names = [graph.operators[max(members(mask), key=lambda at: weights[at])].name for mask in masks]
    home = {at: name for mask, name in zip(masks, names, strict=True) for at in members(mask)}
    return ModelGraph(
        graph.name, tuple(_together(graph, mask, name, home) for mask, name in zip(masks, names, strict=True))
    )


def _together(graph: ModelGraph, mask: int, name: str, home: dict[int, str]) -> Operator:
    its = [graph.operators[at] for at in members(mask)]
    inputs = {home[source] for at in members(mask) for source in members(graph.inputs[at] & ~mask)}
    inside = sum(graph.operators[at].output_bytes for at in members(mask) if not graph.outputs[at] & ~mask)
    output = sum(graph.operators[at].output_bytes for at in members(mask) if graph.outputs[at] & ~mask)
    return Operator(
        name=name,
        inputs=tuple(sorted(inputs)),
        forward_flops=sum(one.forward_flops for one in its),
        parameters=sum(one.parameters for one in its),
        moved_bytes=sum(one.moved_bytes for one in its) + 2 * inside,  # written, and read again
        output_bytes=output,
        kept_bytes=sum(one.kept for one in its),
    )
