"""The time and memory of bubbles that a plan may use, and the rest that it leaves to a second job (not in the paper).

The runtime reserves some of both.  A job's memory stays on the device in all bubbles and between them.  So its largest
node has to fit into the least memory that the training ever leaves, less a margin, and not only into that of its own
bubble: this is the cap that its worker is held to (``agent/memory.py``).
"""

from __future__ import annotations

from dataclasses import replace

from megatron.fill.display import mib
from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.profiles import BubbleCycle, BubbleSlot, JobProfile

RESERVE_NS = 300_000  # time of each bubble lost to wake-up and pause
MARGIN_BYTES = 1 << 30  # device memory left for the training to grow; the default of --fill-memory-margin-mib


def room_bytes(cycle: BubbleCycle, margin_bytes: int) -> int:
    """Return the device memory that a job may hold permanently; 0 if the training leaves no more than the margin."""
    return max(0, min((slot.free_bytes for slot in cycle.slots), default=0) - margin_bytes)


def why_no_memory(free_bytes: int, margin_bytes: int, job_bytes: int | None, others_bytes: int = 0) -> str:
    """Return why a worker cannot have the memory that its job asks for, None for any; empty if it can.

    ``others_bytes`` were promised to other jobs, which do not hold them yet.
    """
    left_bytes = free_bytes - margin_bytes - others_bytes
    if left_bytes <= 0:
        others = f" and {mib(others_bytes)} of other jobs" if others_bytes else ""
        margin = f"no more than the margin of {mib(margin_bytes)}{others}"
        return f"the main job leaves {mib(free_bytes)} free at its peak: {margin}"
    if job_bytes is not None and left_bytes < job_bytes:
        return f"it asks for {mib(job_bytes)}, and the main job leaves {mib(left_bytes)}"
    return ""


def held_cycle(cycle: BubbleCycle, held_bytes: int, cap_bytes: int | None = None) -> BubbleCycle:
    """Return the cycle with a job's permanent memory limit as the free memory of every bubble.

    The limit is ``held_bytes``, or the memory that the job asked for, if any and if that is less.
    """
    free_bytes = held_bytes if cap_bytes is None else min(held_bytes, cap_bytes)
    return BubbleCycle(cycle.period_ns, tuple(replace(slot, free_bytes=free_bytes) for slot in cycle.slots))


def leftover(
    cycle: BubbleCycle, plan: ExecutionPlan, profile: JobProfile, promised_bytes: int | None = None
) -> BubbleCycle:
    """Return the tails that a plan of this cycle leaves, as a bubble cycle from which ``best_plan`` plans another job.

    The rest of a bubble differs from cycle to cycle until the plan repeats, so the result spans all cycles of the plan
    and is exact: the minimum over the cycles would waste most of the time, and the mean would promise time that is not
    there.  A resident job keeps its memory between its nodes, so its peak memory is subtracted from every bubble, or
    ``promised_bytes``, if it asked for that amount.
    """
    taken_bytes = profile.memory_bytes if promised_bytes is None else promised_bytes
    taken_ns = {
        (chunk.cycle, chunk.bubble): plan.reserve_ns + duration_ns
        for chunk, duration_ns in zip(plan.chunks(), plan.durations_ns(profile), strict=True)
    }
    slots = [
        BubbleSlot(
            slot.kind,
            slot.duration_ns - taken_ns.get((number, bubble), 0),
            max(0, slot.free_bytes - taken_bytes),
        )
        for number in range(plan.cycles)
        for bubble, slot in enumerate(cycle.slots)
    ]
    return BubbleCycle(cycle.period_ns * plan.cycles, tuple(slots))


def packed_ns(plan: ExecutionPlan, profile: JobProfile) -> float:
    """Return the long-run time inside nodes per cycle, in ns."""
    return plan.iterations * profile.duration_ns / plan.cycles


def processing_time_s(cycle: BubbleCycle, plan: ExecutionPlan, remaining_work: float) -> float:
    """Return the wall-clock seconds for the remaining work, including the training's compute between bubbles."""
    return remaining_work / plan.work_per_cycle * cycle.period_ns / 1e9
