"""The bubbles of a schedule, as times, shares and cycles for the planner, and its peak activation memory."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.fill.pipeline.schedule import Pass, Schedule
from megatron.fill.pipeline.timeline import Timeline
from megatron.fill.profiles import BubbleCycle, BubbleSlot
from megatron.fill.types import PIPELINE_KINDS, BubbleKind


def bubble_seconds(timeline: Timeline) -> tuple[dict[BubbleKind, float], ...]:
    """The seconds of each kind of bubble in an iteration, per rank."""
    return tuple(
        {kind: sum(wait.duration_ns for wait in row if wait.kind is kind) / 1e9 for kind in PIPELINE_KINDS}
        for row in timeline.waits
    )


def bubble_share(timeline: Timeline) -> float:
    """The share of bubbles in the time of all ranks; 0 for an iteration that takes no time."""
    total_ns = len(timeline.waits) * timeline.period_ns
    return sum(wait.duration_ns for row in timeline.waits for wait in row) / total_ns if total_ns else 0.0


def bubble_cycle(timeline: Timeline, rank: int, free_bytes: int) -> BubbleCycle:
    """The bubble cycle of a rank, in the order in which runs record bubbles; ValueError if there is no such rank."""
    if not 0 <= rank < len(timeline.waits):
        raise ValueError(f"rank is {rank}; expected 0 to {len(timeline.waits) - 1}")
    slots = (BubbleSlot(wait.kind, wait.duration_ns, free_bytes) for wait in timeline.waits[rank])
    return BubbleCycle(timeline.period_ns, tuple(slots))


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """The greatest number of microbatches times chunks whose activations are held at once, per rank.

    A forward allocates them when it starts; ``B`` or ``W`` frees them when it has ended.  ``I`` frees nothing: the
    weight pass still needs the layers' inputs, though a real ``I`` can free the rest.
    """
    return peak_activation_bytes(schedule, [1] * schedule.virtual_stages)


def peak_activation_bytes(schedule: Schedule, held_bytes: Sequence[int]) -> tuple[int, ...]:
    """The peak of the activations in bytes, per rank, given those of a microbatch on each of the virtual stages."""
    return tuple(map(int, peak_pass_bytes(schedule, held_bytes, held_bytes)))


def peak_pass_bytes(schedule: Schedule, kept_bytes: Sequence[float], peak_bytes: Sequence[float]) -> tuple[float, ...]:
    """The peak memory of the passes in bytes, per rank, if a backward pass needs more than its forward pass has kept.

    Args:
        kept_bytes: memory that one microbatch keeps from its forward pass on, per virtual stage.
        peak_bytes: peak of a microbatch in its backward pass, ``kept_bytes`` included, per virtual stage.

    Raises:
        ValueError: there is not one number of each per virtual stage.
    """
    for name, given in (("kept_bytes", kept_bytes), ("peak_bytes", peak_bytes)):
        if len(given) != schedule.virtual_stages:
            raise ValueError(f"{len(given)} {name}; expected {schedule.virtual_stages}: one each")
    found = []
    for rank, row in enumerate(schedule.order):
        held = most = 0.0
        for op in row:
            stage = schedule.virtual_stage(rank, op)
            if op.kind is Pass.FORWARD:
                held += kept_bytes[stage]
                most = max(most, held)
                continue
            most = max(most, held - kept_bytes[stage] + peak_bytes[stage])
            if op.kind is not Pass.INPUT:
                held -= kept_bytes[stage]
        found.append(most)
    return tuple(found)
