"""The reason why a job does not fit: the node that is too long or too large, for which bubble, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from megatron.fill.display import size
from megatron.fill.profiles import BubbleCycle, BubbleSlot, JobProfile, NodeProfile


def why_nothing_fits(cycle: BubbleCycle, profiles: Sequence[JobProfile], reserve_ns: int) -> str:
    """Return the reason in one line, for the configuration that comes closest to fitting.

    It names that configuration's worst node, and the bubble that fits this node best.
    """
    if not profiles:
        return "the job has no profile; expected one for at least one configuration"
    if not cycle.slots:
        return "the cycle has no bubbles; expected at least one"
    longest_ns = max(slot.duration_ns for slot in cycle.slots)
    if longest_ns <= reserve_ns:
        return (
            f"the longest bubble is {_ms(longest_ns)}; expected more than the {_ms(reserve_ns)} that each one reserves"
        )
    closest = min((_worst(cycle, profile, reserve_ns) for profile in profiles), key=lambda worst: worst[0])
    return _explain(cycle, *closest[1:], reserve_ns)


def _worst(cycle: BubbleCycle, profile: JobProfile, reserve_ns: int) -> tuple[float, JobProfile, NodeProfile, int]:
    """Find the node that exceeds its best bubble most; return the excess, the profile, the node, and the bubble."""
    found = []
    for node in profile.nodes:
        excess = [_excess(node, slot, reserve_ns) for slot in cycle.slots]
        found.append((min(excess), profile, node, excess.index(min(excess))))
    return max(found, key=lambda misfit: misfit[0])


def _excess(node: NodeProfile, slot: BubbleSlot, reserve_ns: int) -> float:
    """Return the excess in time or in memory, the larger one, as a share of the bubble; at most 0 if the node fits."""
    usable_ns = slot.duration_ns - reserve_ns
    time = node.duration_ns / usable_ns - 1 if usable_ns > 0 else inf
    memory = node.memory_bytes / slot.free_bytes - 1 if slot.free_bytes else inf * node.memory_bytes
    return max(time, memory)


def _explain(cycle: BubbleCycle, profile: JobProfile, node: NodeProfile, bubble: int, reserve_ns: int) -> str:
    slot = cycle.slots[bubble]
    usable_ns = max(0, slot.duration_ns - reserve_ns)
    too_much = []
    if node.duration_ns > usable_ns:
        too_much.append(f"{_ms(node.duration_ns - usable_ns)} too long")
    if node.memory_bytes > slot.free_bytes:
        too_much.append(f"{size(node.memory_bytes - slot.free_bytes)} too large")
    reserved = f" with {_ms(reserve_ns)} reserved" if reserve_ns else ""
    reason = (
        f"node {node.name!r} of {profile.configuration} ({_ms(node.duration_ns)}, {size(node.memory_bytes)}) is"
        f" {' and '.join(too_much)} for bubble {bubble} ({slot.kind}, {_ms(slot.duration_ns)}{reserved},"
        f" {size(slot.free_bytes)} free), which fits it best"
    )
    most = max(slot.free_bytes for slot in cycle.slots)
    return reason if node.memory_bytes <= most else f"{reason}; no bubble has more than {size(most)} free"


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.3f} ms"
