"""What a schedule leaves: bubbles, as times, shares and cycles for the planner, and the activations that it holds.

The closed forms hold for virtual stages that are all alike and for transfers, reductions and optimizers that take no
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from megatron.fill.pipeline.schedule import Op, Pass, Schedule
from megatron.fill.pipeline.timeline import Timeline
from megatron.fill.profiles import BubbleCycle, BubbleSlot
from megatron.fill.types import BubbleKind


def bubble_seconds(timeline: Timeline) -> tuple[dict[BubbleKind, float], ...]:
    """Per rank, how long its bubbles of each kind are in an iteration, in seconds."""
    return tuple(
        {kind: sum(wait.duration_ns for wait in row if wait.kind is kind) / 1e9 for kind in BubbleKind}
        for row in timeline.waits
    )


def bubble_share(timeline: Timeline) -> float:
    """Of the time of all ranks, how much is bubbles; 0 for an iteration that takes no time."""
    total_ns = len(timeline.waits) * timeline.period_ns
    return sum(wait.duration_ns for row in timeline.waits for wait in row) / total_ns if total_ns else 0.0


def bubble_cycle(
    timeline: Timeline, rank: int, free_bytes: int | Sequence[int], join_fill_drain: bool = False
) -> BubbleCycle:
    """A rank's bubbles as the planner takes them, in the order in which real runs record them.

    Args:
        free_bytes: device memory that the main job leaves, in all bubbles or one by one.
        join_fill_drain: take the drain and the next iteration's fill for one bubble, as PipeFill does (section 2).  It
            comes last, as *drain*: its length is that of its parts, its memory the least of theirs.  Without an
            optimizer in between that is exact.  With one, work that lasts longer than either part runs into the
            optimizer's time, which is left out of the bubble.

    Raises:
        ValueError: there is no such rank, or there are not as many ``free_bytes`` as bubbles.
    """
    if not 0 <= rank < len(timeline.waits):
        raise ValueError(f"rank is {rank}; expected 0 to {len(timeline.waits) - 1}")
    waits = timeline.waits[rank]
    free = [free_bytes] * len(waits) if isinstance(free_bytes, int) else list(free_bytes)
    if len(free) != len(waits):
        raise ValueError(f"{len(free)} free_bytes; expected one for each of the {len(waits)} bubbles of rank {rank}")
    slots = [BubbleSlot(wait.kind, wait.duration_ns, bytes_) for wait, bytes_ in zip(waits, free, strict=True)]
    if join_fill_drain:
        ends = [slot for slot in slots if slot.kind in (BubbleKind.DRAIN, BubbleKind.FILL)]
        if ends:
            slots = [slot for slot in slots if slot.kind not in (BubbleKind.DRAIN, BubbleKind.FILL)]
            duration_ns = sum(slot.duration_ns for slot in ends)
            slots.append(BubbleSlot(BubbleKind.DRAIN, duration_ns, min(slot.free_bytes for slot in ends)))
    return BubbleCycle(timeline.period_ns, tuple(slots))


def ideal_bubble_share(stages: int, microbatches: int, chunks: int = 1) -> float:
    """The bubble share of GPipe and 1F1B, and with more chunks that of interleaved 1F1B.

    Narayanan et al. 2021 (arXiv 2104.04473), sections 2.2.1 and 2.2.2, have the bubbles' time per time of computing:
    (p - 1) / (v * m).  That makes (p - 1) / (v * m + p - 1) of the whole, with every group size that Megatron takes.
    """
    return (stages - 1) / (chunks * microbatches + stages - 1)


def zb_h1_bubble_ns(stages: int, forward_ns: int, input_ns: int, weight_ns: int) -> int:
    """How long each rank's bubbles are with ZB-H1: (p - 1)(F + I - W) (Qi et al. 2023, arXiv 2401.10241, table 2).

    It holds for as many microbatches as stages or more, and weight passes that take no longer than the others.
    """
    return (stages - 1) * (forward_ns + input_ns - weight_ns)


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, for how many microbatches times chunks it holds activations at most.

    A forward allocates them when it starts; ``B`` or ``W`` frees them when it has ended.  ``I`` frees nothing: the
    weight pass still needs the layers' inputs, though a real ``I`` can free the rest.
    """
    return peak_activation_bytes(schedule, [1] * schedule.virtual_stages)


def peak_activation_bytes(schedule: Schedule, bytes_per_virtual_stage: Sequence[int]) -> tuple[int, ...]:
    """Per rank, how many bytes of activations it holds at most.

    Args:
        bytes_per_virtual_stage: what one microbatch takes there.

    Raises:
        ValueError: it is not one per virtual stage.
    """
    if len(bytes_per_virtual_stage) != schedule.virtual_stages:
        raise ValueError(
            f"{len(bytes_per_virtual_stage)} bytes_per_virtual_stage; expected {schedule.virtual_stages}: one each"
        )

    def change(rank: int, op: Op) -> int:
        held = bytes_per_virtual_stage[schedule.virtual_stage(rank, op)]
        return {Pass.FORWARD: held, Pass.INPUT: 0}.get(op.kind, -held)

    return tuple(max(accumulate(change(rank, op) for op in row)) for rank, row in enumerate(schedule.order))


def peak_pass_bytes(schedule: Schedule, kept_bytes: Sequence[float], peak_bytes: Sequence[float]) -> tuple[float, ...]:
    """Per rank, how many bytes its passes hold at most, if a backward pass needs more than its forward pass has kept.

    Args:
        kept_bytes: per virtual stage, of one microbatch, from its forward pass on.
        peak_bytes: the most in its backward pass, what it has kept included.

    Raises:
        ValueError: they are not one per virtual stage.
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
