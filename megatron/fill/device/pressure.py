"""Keeping the main job's memory free: how much a worker may have, and what to do when the main job grows.

The main job needs more than in its usual cycle when it evaluates, or when a longer sequence comes.  Nothing is asked
of it: a margin stays free at all times, and while the main job eats into it the workers give theirs back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron.fill.device.port import DeviceError, mib

_LAST = 4  # below the margin divided by this there is no time to ask


class Order(StrEnum):
    """What a worker has to do, from mild to harsh."""

    OK = "ok"
    SHRINK = "shrink"
    STOP = "stop"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class PressureOrder:
    """An order and its grounds.

    Attributes:
        held_bytes: with SHRINK, what the worker may still hold.
        reason: for people; empty with OK.
    """

    order: Order
    held_bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """No worker fits at all."""

    reason: str


class MemoryGuard:
    """Judges one worker by the free memory of its device.

    Args:
        margin_bytes: what has to stay free.
        patience_s: how long a worker has to shrink before it is stopped.
        clock: seconds, monotonic.

    Raises:
        DeviceError: the margin is negative.
    """

    def __init__(self, margin_bytes: int, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        if margin_bytes < 0:
            raise DeviceError(f"a memory margin of {margin_bytes} bytes: expected 0 or more")
        self.margin_bytes = margin_bytes
        self.patience_s = patience_s
        self._clock = clock
        self._since_s: float | None = None  # since when the margin has been eaten into

    def judge(self, free_bytes: int, held_bytes: int) -> PressureOrder:
        """What to do now; called a few times a second.

        Args:
            free_bytes: free on the device, for everyone.
            held_bytes: what the worker holds; one that holds nothing has nothing to give.
        """
        if free_bytes >= self.margin_bytes or held_bytes <= 0:
            self._since_s = None
            return PressureOrder(Order.OK)
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
        reason = f"the main job needs the memory: {mib(free_bytes)} free of a margin of {mib(self.margin_bytes)}"
        if free_bytes * _LAST < self.margin_bytes:
            return PressureOrder(Order.KILL, reason=reason)
        if now_s - self._since_s >= self.patience_s:
            reason += f", and the worker did not shrink within {self.patience_s:g} s"
            return PressureOrder(Order.STOP, reason=reason)
        return PressureOrder(Order.SHRINK, max(0, held_bytes - (self.margin_bytes - free_bytes)), reason)


def cap(
    job_bytes: int | None, cycle_free: Sequence[int], margin_bytes: int, held_by_others: int = 0
) -> int | NoRoom | None:
    """How much memory a worker may have.

    Args:
        job_bytes: what the job asked for; None for as much as there is.
        cycle_free: the free bytes in each bubble of the main job's cycle; empty while the cycle is unknown.
        margin_bytes: what has to stay free, a worker's ``overhead_bytes`` included.
        held_by_others: what other workers of the device may use.

    Returns:
        Bytes; None for no cap (the cycle is unknown and the job asked for none); or that there is no room.
    """
    if not cycle_free:
        return job_bytes
    room = min(cycle_free) - margin_bytes - held_by_others
    if room <= 0:
        others = f" and {mib(held_by_others)} of other jobs" if held_by_others else ""
        return NoRoom(
            f"the main job leaves {mib(min(cycle_free))} free at its peak: no more than the margin of "
            f"{mib(margin_bytes)}{others}"
        )
    return room if job_bytes is None else min(job_bytes, room)
