"""What an execution plan is checked against: every way to stop early, and an upper bound on the work of any plan."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.profiles import BubbleCycle, BubbleSlot, JobProfile, NodeProfile

_CYCLES = 2000  # cycles simulated at most


def _fits(node: NodeProfile, slot: BubbleSlot) -> bool:
    """True if this node alone fits into the bubble."""
    return node.duration_ns <= slot.duration_ns and node.memory_bytes <= slot.free_bytes


def runs(cycle: BubbleCycle, profile: JobProfile) -> bool:
    """True if every node fits some bubble, so that the job can make progress."""
    return all(any(_fits(node, slot) for slot in cycle.slots) for node in profile.nodes)


def fractional_bound(cycle: BubbleCycle, profile: JobProfile) -> float:
    """Return an upper bound on the work per cycle of any plan: the work if nodes could be split between bubbles.

    Their order and their memory are kept.  Bubbles too short for any node do not count.  The bound is 0 if some node
    fits no bubble.
    """
    if not runs(cycle, profile):
        return 0.0
    nodes = [node for node in profile.nodes if node.duration_ns]
    shortest_ns = min(node.duration_ns for node in nodes)
    slots = [slot for slot in cycle.slots if slot.duration_ns >= shortest_ns]
    if all(profile.memory_bytes <= slot.free_bytes for slot in slots):
        return sum(slot.duration_ns for slot in slots) / profile.duration_ns * profile.work
    *starts, total_ns = accumulate((node.duration_ns for node in nodes), initial=0)
    barred = {
        slot.free_bytes: [
            start for start, node in zip(starts, nodes, strict=True) if node.memory_bytes > slot.free_bytes
        ]
        for slot in slots
    }
    at_ns, seen = 0, {0: (0, 0)}
    for number in range(1, _CYCLES + 1):
        for slot in slots:
            iteration, inside_ns = divmod(at_ns, total_ns)
            node = nodes[bisect_right(starts, inside_ns) - 1]
            if node.memory_bytes > slot.free_bytes:
                continue
            end_ns = at_ns + slot.duration_ns
            if too_large := barred[slot.free_bytes]:
                following = bisect_left(too_large, inside_ns)
                wall_ns = too_large[following] if following < len(too_large) else total_ns + too_large[0]
                end_ns = min(end_ns, iteration * total_ns + wall_ns)
            at_ns = end_ns
        if at_ns % total_ns in seen:
            before_ns, before = seen[at_ns % total_ns]
            return (at_ns - before_ns) / total_ns / (number - before) * profile.work
        seen[at_ns % total_ns] = (at_ns, number)
    return (at_ns / total_ns + 1) / _CYCLES * profile.work  # a monotone map deviates from its rate by at most 1


def violations(cycle: BubbleCycle, plan: ExecutionPlan, profile: JobProfile) -> int:
    """Bubbles whose time or memory the plan exceeds, node by node and without the planner's own arithmetic."""
    found, at = 0, plan.first_node
    for row in plan.counts:
        for slot, count in zip(cycle.slots, row, strict=True):
            nodes = [profile.nodes[(at + offset) % len(profile.nodes)] for offset in range(count)]
            too_long = sum(node.duration_ns for node in nodes) > slot.duration_ns
            found += too_long or any(node.memory_bytes > slot.free_bytes for node in nodes)
            at += count
    return found + (at % len(profile.nodes) != plan.first_node)


def optimum(cycle: BubbleCycle, profiles: Sequence[JobProfile]) -> float:
    """The most work per cycle of any way to stop early and to choose the configuration for each iteration.

    States are (configuration, next node), ``(-1, 0)`` between iterations; the best mean over all closed walks of cycles
    is found with Karp's theorem.
    """
    start = (-1, 0)
    edges: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        if state not in edges:
            ends = {state: 0.0}
            for slot in cycle.slots:
                ends = _ways(slot, profiles, ends)
            edges[state] = ends
            waiting += ends
    walks = [{start: 0.0}]
    for _ in edges:
        longer: dict[tuple[int, int], float] = {}
        for state, done in walks[-1].items():
            for end, work in edges[state].items():
                longer[end] = max(longer.get(end, -inf), done + work)
        walks.append(longer)
    steps = len(edges)
    return max(
        min((most - walks[k][end]) / (steps - k) for k in range(steps) if end in walks[k])
        for end, most in walks[-1].items()
    )


def _ways(
    slot: BubbleSlot, profiles: Sequence[JobProfile], begins: dict[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """The most work done per state that can be reached in a bubble, from any of the states before it."""
    best: dict[tuple[tuple[int, int], int], float] = {}
    waiting = [(state, 0, work) for state, work in begins.items()]
    while waiting:
        state, used_ns, work = waiting.pop()
        if best.get((state, used_ns), -1.0) >= work:
            continue
        best[state, used_ns] = work
        for number in range(len(profiles)) if state[0] < 0 else (state[0],):
            profile, node = profiles[number], profiles[number].nodes[state[1]]
            if used_ns + node.duration_ns <= slot.duration_ns and node.memory_bytes <= slot.free_bytes:
                last = state[1] + 1 == len(profile.nodes)
                after = (-1, 0) if last else (number, state[1] + 1)
                waiting.append((after, used_ns + node.duration_ns, work + profile.work * last))
    ends: dict[tuple[int, int], float] = {}
    for (state, _), work in best.items():
        ends[state] = max(ends.get(state, 0.0), work)
    return ends
