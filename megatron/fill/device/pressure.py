"""Protection of the training's memory: the memory cap of a worker, and the response when the training grows.

The training needs more memory than in its usual cycle when it evaluates, or when a longer sequence comes.  It is never
asked to wait: a margin stays free at all times, and when the training grows into it, workers must free memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron.fill.device.port import DeviceError
from megatron.fill.display import mib

_LAST = 4  # with less than the margin divided by this free, a worker is killed without being asked to shrink


class Order(StrEnum):
    """The orders to a worker, by increasing severity."""

    OK = "ok"
    SHRINK = "shrink"
    STOP = "stop"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class PressureOrder:
    """An order and its reason.

    Attributes:
        held_bytes: memory that the worker may still hold, with SHRINK; else None.
        reason: explanation for messages; empty with OK.
    """

    order: Order
    held_bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The result that no worker fits into the device's memory."""

    reason: str


@dataclass(eq=False)
class MemoryGuard:
    """The memory policy for one worker, based on the free memory of its device.

    Args:
        margin_bytes: memory that has to stay free.
        patience_s: time in s in which a worker has to shrink before it is stopped.
        clock: monotonic clock in s.

    Raises:
        DeviceError: the margin is negative.
    """

    margin_bytes: int
    patience_s: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if self.margin_bytes < 0:
            raise DeviceError(f"a memory margin of {self.margin_bytes} bytes: expected 0 or more")
        self._since_s: float | None = None  # time since which less than the margin is free

    def judge(self, free_bytes: int, held_bytes: int) -> PressureOrder:
        """The order for the worker now; called a few times a second.

        Args:
            free_bytes: free memory of the device.
            held_bytes: memory that the worker holds; a worker without memory cannot free any, so it gets OK.
        """
        if free_bytes >= self.margin_bytes or held_bytes <= 0:
            self._since_s = None
            return PressureOrder(Order.OK)
        now_s = self.clock()
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
    """The memory cap of a worker.

    Args:
        job_bytes: memory that the job asked for; None for as much as there is.
        cycle_free: free bytes in each bubble of the training's cycle; empty while the cycle is unknown.
        margin_bytes: memory that has to stay free, a worker's ``overhead_bytes`` included.
        held_by_others: memory that other workers of the device may use.

    Returns:
        Cap in bytes; None for no cap (the cycle is unknown and the job asked for no amount); ``NoRoom`` if nothing is
        left.
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
