"""What a plan has of each bubble: the runtime keeps a little time of it to wake up in, and memory for the main job.

A job's memory stays on the device in all bubbles and between them.  So its largest node has to fit the least that the
main job ever leaves, less a margin, and not only the bubble that it runs in: that is the cap that its worker is held to
(``device/pressure.py``).
"""

from __future__ import annotations

from dataclasses import replace

from megatron.fill.profiles import BubbleCycle

RESERVE_NS = 300_000  # of each bubble, for waking up and pausing: what no step can use of it
MARGIN_BYTES = 1 << 30  # of device memory, for the main job to grow into, where --fill-memory-margin-mib says no other


def room_bytes(cycle: BubbleCycle, margin_bytes: int) -> int:
    """What a job may hold all the time; 0 if the main job leaves no more than the margin."""
    return max(0, min((slot.free_bytes for slot in cycle.slots), default=0) - margin_bytes)


def held_cycle(cycle: BubbleCycle, held_bytes: int, cap_bytes: int | None = None) -> BubbleCycle:
    """The cycle for a job that may hold so much, in every bubble.

    Args:
        cap_bytes: what the job asked for; None if it did not say.
    """
    free_bytes = held_bytes if cap_bytes is None else min(held_bytes, cap_bytes)
    return BubbleCycle(cycle.period_ns, tuple(replace(slot, free_bytes=free_bytes) for slot in cycle.slots))
