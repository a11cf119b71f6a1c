"""What the bubbles of graph and sequential pipelines are worth, and what both do with and without filling."""

from __future__ import annotations

from megatron.fill.profiles import BubbleCycle, BubbleSlot
from megatron.fill.wings.configure.value import fill_kinds, gpus_worth
from megatron.fill.wings.graph.baselines import plan_sequential
from megatron.fill.wings.graph.cost import Cluster
from megatron.fill.wings.graph.model import ModelGraph
from megatron.fill.wings.graph.search import micro_batches, plan_graph
from megatron.fill.wings.graph.timeline import GraphTimeline


def measure(graph: ModelGraph, cluster: Cluster, batch: int) -> dict[str, dict[str, float]]:
    """By planner.

    ``combined`` is samples for each device-second, where those that the fill work would have taken on devices of its
    own do not count; ``alone`` is the same without filling.
    """
    kinds = fill_kinds(cluster.gpu, None)
    rows = {}
    for name, planner in (("graph", plan_graph), ("sequential", plan_sequential)):
        timeline = planner(graph, cluster, batch, micro_batches(batch)).timeline
        plan = timeline.plan
        worth = sum(
            len(stage.devices) * gpus_worth(_cycle(timeline, number), kinds) for number, stage in enumerate(plan.stages)
        )
        rows[name] = {
            "samples_s": timeline.samples_s,
            "devices": plan.devices,
            "bubbles": timeline.bubble_share(),
            "gpus_worth": worth,
            "alone": timeline.samples_s / plan.devices,
            "combined": timeline.samples_s / (plan.devices - worth),
        }
    return rows


def _cycle(timeline: GraphTimeline, stage: int) -> BubbleCycle:
    """Of each device of a stage, with what the training leaves of its memory."""
    plan = timeline.plan
    free = max(0, int(plan.cluster.device_bytes - plan.memory_bytes(stage)))
    slots = tuple(BubbleSlot(wait.kind, wait.duration_ns, free) for wait in timeline.waits[stage])
    return BubbleCycle(timeline.period_ns, slots)
