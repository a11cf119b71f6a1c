"""An upper bound on the work of any plan, to compare a plan with."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate

from megatron.fill.profiles import BubbleCycle, BubbleSlot, JobProfile, NodeProfile

_CYCLES = 2000  # cycles simulated at most


def fits(node: NodeProfile, slot: BubbleSlot) -> bool:
    """True if this node alone fits into the bubble."""
    return node.duration_ns <= slot.duration_ns and node.memory_bytes <= slot.free_bytes


def runs(cycle: BubbleCycle, profile: JobProfile) -> bool:
    """True if every node fits some bubble, so that the job can make progress."""
    return all(any(fits(node, slot) for slot in cycle.slots) for node in profile.nodes)


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
