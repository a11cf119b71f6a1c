"""Time and memory of a bubble that a plan may use: the runtime reserves some of both.

A job's memory stays on the device in all bubbles and between them.  So its largest node has to fit into the least
memory that the training ever leaves, less a margin, and not only into that of its own bubble: this is the cap that its
worker is held to (``device/pressure.py``).
"""

from __future__ import annotations

from dataclasses import replace

from megatron.fill.profiles import BubbleCycle

RESERVE_NS = 300_000  # time of each bubble lost to wake-up and pause
MARGIN_BYTES = 1 << 30  # device memory left for the training to grow; the default of --fill-memory-margin-mib


def room_bytes(cycle: BubbleCycle, margin_bytes: int) -> int:
    """Return the device memory that a job may hold permanently; 0 if the training leaves no more than the margin."""
    return max(0, min((slot.free_bytes for slot in cycle.slots), default=0) - margin_bytes)


def held_cycle(cycle: BubbleCycle, held_bytes: int, cap_bytes: int | None = None) -> BubbleCycle:
    """Return the cycle with a job's permanent memory limit as the free memory of every bubble.

    Args:
        held_bytes: device memory that the job may hold permanently.
        cap_bytes: memory that the job asked for; None if it named none.
    """
    free_bytes = held_bytes if cap_bytes is None else min(held_bytes, cap_bytes)
    return BubbleCycle(cycle.period_ns, tuple(replace(slot, free_bytes=free_bytes) for slot in cycle.slots))
