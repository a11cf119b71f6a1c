"""The timeline of one iteration of a plan, and each stage's bubbles.  Times are in nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.errors import GraphError
from megatron.fill.pipeline.schedule import Op, Pass, execution_order
from megatron.fill.pipeline.timeline import PassSpan, Wait
from megatron.fill.types import BubbleKind
from megatron.fill.wings.graph.model import ModelGraph
from megatron.fill.wings.graph.plan import Plan

_NAMED = 3  # operators that an error names


@dataclass(frozen=True, slots=True)
class GraphTimeline:
    """The timeline of an iteration, beginning when all stages have left the previous one's gradient all-reduce.

    A stage's passes, all-reduce and bubbles together make up the period.
    """

    plan: Plan
    period_ns: int
    spans: tuple[tuple[PassSpan, ...], ...]  # passes of each stage in order
    waits: tuple[tuple[Wait, ...], ...]  # bubbles of each stage in order
    reduce_ns: tuple[int, ...]  # duration of each stage's all-reduce

    @property
    def samples_s(self) -> float:
        """Throughput: samples per second."""
        return self.plan.batch / self.period_ns * 1e9

    def bubble_share(self, stage: int | None = None) -> float:
        """Bubbles' share of a stage's time, or of the time of all devices that have a stage."""
        numbers = range(len(self.waits)) if stage is None else [stage]
        sizes = [len(self.plan.stages[number].devices) for number in numbers]
        bubbles = [sum(wait.duration_ns for wait in self.waits[number]) for number in numbers]
        return sum(a * b for a, b in zip(sizes, bubbles, strict=True)) / (sum(sizes) * self.period_ns)


def simulate(plan: Plan) -> GraphTimeline:
    """Time one iteration.  A transfer takes its time between two passes; its stages compute in the meantime.

    GraphError, which names costs that are 0, if an iteration takes no time.
    """
    costs, stages = plan.costs, plan.stages
    passes_ns = []
    for mask, its in zip(plan.masks, stages, strict=True):
        forward_s, backward_s = costs.passes_s(mask, its.micro_batch // len(its.devices))
        passes_ns.append({Pass.FORWARD: _ns(forward_s), Pass.BACKWARD: _ns(backward_s)})
    # forward the activations of the receiver's microbatch, backward their gradients
    transfer_ns: dict[tuple[int, int], int] = {}
    for (source, target), size in plan.edges.items():
        senders, receivers = len(stages[source].devices), len(stages[target].devices)
        samples = min(stages[source].micro_batch, stages[target].micro_batch)
        link_ns = _ns(plan.cluster.transfer_s(size, samples, senders, receivers)) if size else 0
        transfer_ns[source, target] = transfer_ns[target, source] = link_ns
    rows = [plan.passes(stage) for stage in range(len(stages))]
    order, _ = execution_order([[tuple(n for n, _ in entry) for entry in row] for row in plan.needs])
    places = [(stage, at) for stage, row in enumerate(rows) for at in range(len(row))]
    starts, ends = [0] * len(places), [0] * len(places)
    for number in order:
        stage, at = places[number]
        start = ends[number - 1] if at else 0
        for needed, other in plan.needs[stage][at]:
            link_ns = 0 if other is None else transfer_ns[other, stage]
            start = max(start, ends[needed] + link_ns)
        starts[number] = start
        ends[number] = start + passes_ns[stage][rows[stage][at].kind]
    reduces = [
        _ns(plan.cluster.reduce_s(costs.sums(mask)[0], len(its.devices)))
        for mask, its in zip(plan.masks, stages, strict=True)
    ]
    spans, first = [], 0
    for row in rows:
        spans.append(tuple(PassSpan(op, starts[first + at], ends[first + at]) for at, op in enumerate(row)))
        first += len(row)
    period_ns = max(row[-1].end_ns + reduce_ns for row, reduce_ns in zip(spans, reduces, strict=True))
    if period_ns == 0:
        raise GraphError(
            f"{plan.graph.name}: an iteration takes no time: {_costless(plan.graph)}; expected more than 0"
        )
    waits = tuple(_waits(row, reduce_ns, period_ns) for row, reduce_ns in zip(spans, reduces, strict=True))
    return GraphTimeline(plan, period_ns, tuple(spans), waits, tuple(reduces))


def _costless(graph: ModelGraph) -> str:
    """Costs of the first operators of a model in which nothing takes time."""
    named = []
    for its in graph.operators[:_NAMED]:
        fields = ("forward_flops", "output_bytes") if its.forward_s is None else ("forward_s",)
        named.append(f"{' and '.join(f'{field} {getattr(its, field):g}' for field in fields)} of {its.name}")
    more = len(graph.operators) - len(named)
    return ", ".join(named) + (f", and of {more} more operators" if more else "")


def _waits(spans: tuple[PassSpan, ...], reduce_ns: int, period_ns: int) -> tuple[Wait, ...]:
    found, at_ns, seen = [], 0, False
    for op, start_ns, end_ns in spans:
        if start_ns > at_ns:
            found.append(Wait(_kind(op, at_ns == 0, seen), at_ns, start_ns))
        seen = seen or op.kind is Pass.BACKWARD
        at_ns = end_ns
    if period_ns > at_ns + reduce_ns:
        found.append(Wait(BubbleKind.DRAIN, at_ns + reduce_ns, period_ns))
    return tuple(found)


def _kind(op: Op, begins: bool, seen: bool) -> BubbleKind:
    """Return the kind of the bubble before a pass.

    Args:
        begins: True if no pass has run yet.
        seen: True if a backward pass has run.
    """
    if begins:
        return BubbleKind.FILL
    return BubbleKind.FWD_BWD if op.kind is Pass.BACKWARD and not seen else BubbleKind.INTERIOR


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
