"""The estimated processing time of a job on a device, from its execution plan there."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from megatron.fill.planner.search import find_plan
from megatron.fill.planner.tail import processing_time_s
from megatron.fill.profiles import BubbleCycle, JobProfile


def estimate_s(
    cycle: BubbleCycle | None, profiles: Sequence[JobProfile], remaining_work: float | None, reserve_ns: int = 0
) -> float | None:
    """The processing time in seconds of wall-clock time; infinity if the job fits no bubble, None if unknown.

    Args:
        cycle: bubble cycle of the device; None before it is measured.
        profiles: profiles of the job on that device; empty before it is measured.
        remaining_work: remaining work of the job; None if unknown.
        reserve_ns: as for ``find_plan``.
    """
    if cycle is None or not profiles:
        return None
    plan = find_plan(cycle, profiles, reserve_ns)
    if plan is None:
        return inf
    return None if remaining_work is None else processing_time_s(cycle, plan, remaining_work)
