"""What a plan leaves of the bubbles: for a second resident job with smaller steps, beyond the paper."""

from __future__ import annotations

from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.profiles import BubbleCycle, BubbleSlot, JobProfile


def leftover(cycle: BubbleCycle, plan: ExecutionPlan, profile: JobProfile) -> BubbleCycle:
    """The bubbles' tails, as a bubble cycle that ``best_plan`` takes for another job.

    How much is left of a bubble differs from cycle to cycle until the plan repeats, so the result is as many cycles
    long as the plan, and exact: the least over the plan's cycles would give most of the time away, and the mean would
    promise time that is not there.  A resident job keeps its memory between its nodes, so the most that it ever
    needs is taken from every bubble.

    Raises:
        PlanError: the plan is not for this cycle and profile.
    """
    plan.validate(cycle, profile)
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
    """Time inside nodes, per cycle of the plan's bubbles, in the long run."""
    return plan.iterations * profile.duration_ns / plan.cycles


def processing_time_s(cycle: BubbleCycle, plan: ExecutionPlan, remaining_work: float) -> float:
    """Wall-clock seconds for the remaining work, main job's compute included.

    Raises:
        ValueError: negative work.
    """
    if not remaining_work >= 0:
        raise ValueError(f"remaining_work is {remaining_work}; expected at least 0")
    return remaining_work / plan.work_per_cycle * cycle.period_ns / 1e9
