"""How long a job takes on a device, from the plan it would have there."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from megatron.fill.planner.search import find_plan
from megatron.fill.planner.tail import processing_time_s
from megatron.fill.profiles import BubbleCycle, JobProfile


def estimate_s(
    cycle: BubbleCycle | None, profiles: Sequence[JobProfile], remaining_work: float | None, reserve_ns: int = 0
) -> float | None:
    """Wall-clock seconds; infinity if the job fits no bubble, None if it cannot be told.

    Args:
        cycle: the device's; None before it is measured.
        profiles: of the job, on that device; none before it is measured.
        remaining_work: None if the job did not say how much there is.
    """
    if cycle is None or not profiles:
        return None
    plan = find_plan(cycle, profiles, reserve_ns)
    if plan is None:
        return inf
    return None if remaining_work is None else processing_time_s(cycle, plan, remaining_work)
