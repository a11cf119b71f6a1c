"""Protection of the training's memory: the cap of each worker, and the response when the training grows.

The training needs more memory than in its usual cycle when it evaluates, or when a longer sequence comes.  It is never
asked to wait: a margin stays free at all times, and when the training grows into it, workers must free memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

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
    """An order, and its reason for messages."""

    order: Order
    held_bytes: int | None = None  # memory that the worker may still hold, with SHRINK; else None
    reason: str = ""  # empty with OK


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The result that no worker fits into the device's memory."""

    reason: str


@dataclass(eq=False)
class MemoryGuard:
    """The memory policy for one worker, based on the free memory of its device.

    Args:
        margin_bytes: memory that has to stay free.
        patience_s: time in which a worker has to shrink before it is stopped.
        clock: monotonic clock in s.
    """

    margin_bytes: int
    patience_s: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._since_s: float | None = None  # time since which less than the margin is free

    def judge(self, free_bytes: int, held_bytes: int) -> PressureOrder:
        """The order for the worker now, by the device's free memory and the worker's; called a few times a second.

        A worker without memory cannot free any, so it gets OK.
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


def cap(job_bytes: int | None, free_bytes: int, margin_bytes: int, held_by_others: int = 0) -> int | NoRoom:
    """The memory cap of a worker in bytes.

    Args:
        job_bytes: memory that the job asked for; None for as much as there is.
        free_bytes: least free memory in any bubble.
        margin_bytes: memory that has to stay free, a worker's ``overhead_bytes`` included.
        held_by_others: memory that other workers of the device may use.
    """
    room = free_bytes - margin_bytes - held_by_others
    if room <= 0:
        others = f" and {mib(held_by_others)} of other jobs" if held_by_others else ""
        return NoRoom(
            f"the main job leaves {mib(free_bytes)} free at its peak: no more than the margin of "
            f"{mib(margin_bytes)}{others}"
        )
    return room if job_bytes is None else min(job_bytes, room)
