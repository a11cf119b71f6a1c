"""Tails: the rest of the bubbles that a plan leaves to a second resident job with smaller steps (not in the paper)."""

from __future__ import annotations

from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.profiles import BubbleCycle, BubbleSlot, JobProfile


def leftover(cycle: BubbleCycle, plan: ExecutionPlan, profile: JobProfile) -> BubbleCycle:
    """Return the tails that a plan of this cycle leaves, as a bubble cycle from which ``best_plan`` plans another job.

    The rest of a bubble differs from cycle to cycle until the plan repeats, so the result spans all cycles of the plan
    and is exact: the minimum over the cycles would waste most of the time, and the mean would promise time that is not
    there.  A resident job keeps its memory between its nodes, so its peak memory is subtracted from every bubble.
    """
    taken_ns = {
        (chunk.cycle, chunk.bubble): plan.reserve_ns + duration_ns
        for chunk, duration_ns in zip(plan.chunks(), plan.durations_ns(profile), strict=True)
    }
    slots = [
        BubbleSlot(
            slot.kind,
            slot.duration_ns - taken_ns.get((number, bubble), 0),
            max(0, slot.free_bytes - profile.memory_bytes),
        )
        for number in range(plan.cycles)
        for bubble, slot in enumerate(cycle.slots)
    ]
    return BubbleCycle(cycle.period_ns * plan.cycles, tuple(slots))


def packed_ns(plan: ExecutionPlan, profile: JobProfile) -> float:
    """Return the long-run time inside nodes per cycle, in ns."""
    return plan.iterations * profile.duration_ns / plan.cycles


def processing_time_s(cycle: BubbleCycle, plan: ExecutionPlan, remaining_work: float) -> float:
    """Return the wall-clock seconds for the remaining work, including the training's compute between bubbles.

    Raises:
        ValueError: the work is negative.
    """
    if not remaining_work >= 0:
        raise ValueError(f"remaining_work is {remaining_work}; expected at least 0")
    return remaining_work / plan.work_per_cycle * cycle.period_ns / 1e9
