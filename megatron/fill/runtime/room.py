"""Room for the main job: what a worker may hold, and what it must give back when the main job grows."""

from __future__ import annotations

import logging
from collections.abc import Callable

from megatron.fill.device.port import Limiter, WorkerDevice, mib
from megatron.fill.device.pressure import MemoryGuard, NoRoom, Order, cap
from megatron.fill.profiles import BubbleCycle

logger = logging.getLogger("pipefill.agent")


def worker_cap(
    job_bytes: int | None, device: WorkerDevice, cycle: BubbleCycle | None, margin_bytes: int, others_bytes: int
) -> int | NoRoom | None:
    """How much memory a worker may hold; None for no cap, NoRoom if it is less than the job asks for.

    Args:
        cycle: with what was free in each bubble, a job that has ended since still in the way: so what is free now
            counts where it is more.
        others_bytes: what the device's other worker was promised and does not hold yet.
    """
    now_bytes = device.free_bytes()
    free = [max(slot.free_bytes, now_bytes) for slot in cycle.slots] if cycle is not None else []
    found = cap(job_bytes, free or [now_bytes], margin_bytes + device.overhead_bytes, others_bytes)
    if job_bytes is not None and isinstance(found, int) and found < job_bytes:
        return NoRoom(f"it asks for {mib(job_bytes)}, and the main job leaves {mib(found)}")
    return found


class Room:
    """Watches how much of the device is free while one worker runs.

    Args:
        promised_bytes: what the job asked for; 0 if it did not say.
        margin_bytes: what is to stay free.
        shrink: tells the worker to hold no more than so many bytes.
    """

    def __init__(
        self,
        device: WorkerDevice,
        limiter: Limiter,
        promised_bytes: int,
        margin_bytes: int,
        shrink: Callable[[int], None],
    ) -> None:
        self._device = device
        self._limiter = limiter
        self._promised_bytes = promised_bytes
        self._guard = MemoryGuard(margin_bytes)
        self._shrink = shrink
        self._order = Order.OK
        self.reason = ""  # why the worker has to go; empty while it may stay
        self.request = ""  # why it was last asked to shrink; empty if it never was

    @property
    def claim_bytes(self) -> int:
        """What the worker was promised and does not hold yet."""
        return max(0, self._promised_bytes - self._limiter.held_bytes())

    def look(self) -> None:
        """Judge anew; called a few times a second."""
        verdict = self._guard.judge(self._device.free_bytes(), self._limiter.held_bytes())
        if self.reason or (verdict.order is self._order and verdict.order is not Order.SHRINK):
            return
        if verdict.order is not self._order:
            logger.info("memory: %s %s", verdict.order, verdict.reason)
        self._order = verdict.order
        if verdict.order is Order.SHRINK:
            self.request = verdict.reason
            assert verdict.held_bytes is not None
            self._shrink(verdict.held_bytes)
        elif verdict.order in (Order.STOP, Order.KILL):
            self.reason = verdict.reason

    @property
    def why_stop(self) -> str:
        """Why the worker should save and stop; empty if it need not."""
        return self.reason if self._order is Order.STOP else ""

    @property
    def why_end(self) -> str:
        """Why the worker must end at once; empty if it need not."""
        return self.reason if self._order is Order.KILL else ""
