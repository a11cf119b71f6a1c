"""Device memory: the cap of each worker, and the memory that it must give back when the training needs more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.fill.agent.ending import Ending, How
from megatron.fill.device.port import Limiter, WorkerDevice
from megatron.fill.device.pressure import MemoryGuard, NoRoom, Order, cap
from megatron.fill.display import mib
from megatron.fill.profiles import BubbleCycle
from megatron.fill.status import Cause

logger = logging.getLogger("pipefill.agent")


def worker_cap(
    job_bytes: int | None, device: WorkerDevice, cycle: BubbleCycle | None, margin_bytes: int, others_bytes: int
) -> int | NoRoom:
    """Return the memory that a worker may hold in bytes; NoRoom if it is less than the job asks for.

    Args:
        cycle: the bubble cycle, with the memory that was recently free in each bubble; no more counts than is free now.
            Memory that a job has given back since then counts once the rank has published its cycle again, since the
            training may have grown in the meantime.
        others_bytes: memory that the device's other worker was promised and does not hold yet.
    """
    slots = cycle.slots if cycle is not None else ()
    free_bytes = min([device.free_bytes(), *(slot.free_bytes for slot in slots)])
    found = cap(job_bytes, free_bytes, margin_bytes + device.overhead_bytes, others_bytes)
    if job_bytes is not None and isinstance(found, int) and found < job_bytes:
        return NoRoom(f"it asks for {mib(job_bytes)}, and the main job leaves {mib(found)}")
    return found


@dataclass(eq=False, repr=False)
class DeviceMemory:
    """The memory of one device, and the workers that share it with the training; for any thread."""

    device: WorkerDevice
    margin_bytes: int
    patience_s: float  # time that a worker has to give memory back once it is asked

    def __post_init__(self) -> None:
        self._shares: list[MemoryShare] = []

    def cap(self, job_bytes: int | None, cycle: BubbleCycle | None) -> int | NoRoom:
        """Return the memory that a worker may hold in addition to those that run (``worker_cap``)."""
        others_bytes = sum(share.unused_promise_bytes for share in self._shares.copy())
        return worker_cap(job_bytes, self.device, cycle, self.margin_bytes, others_bytes)

    def room_bytes(self, cycle: BubbleCycle) -> int:
        """Return the memory in bytes for a worker that asks for no particular amount."""
        found = self.cap(None, cycle)
        return found if isinstance(found, int) else 0

    @contextmanager
    def shared(
        self,
        limiter: Limiter,
        promised_bytes: int,
        shrink: Callable[[int | None], None],
        shrinking: Callable[[], bool],
    ) -> Iterator[MemoryShare]:
        """Provide the watch over one worker's share while it runs; the arguments are those of ``MemoryShare``."""
        guard = MemoryGuard(self.margin_bytes, self.patience_s)
        share = MemoryShare(self.device, limiter, promised_bytes, guard, shrink, shrinking)
        self._shares.append(share)
        try:
            yield share
        finally:
            self._shares.remove(share)


@dataclass(eq=False, repr=False)
class MemoryShare:
    """Watches how much of the device is free while one worker runs (Watcher).

    Any thread may read ``unused_promise_bytes``; the rest is for the one that watches the worker.
    """

    device: WorkerDevice
    limiter: Limiter
    promised_bytes: int  # memory that the job asked for; 0 if it asked for no particular amount
    guard: MemoryGuard  # decides whether the worker must shrink, stop or be killed
    # Asks the worker to hold at most this many bytes; None repeats the latest request.
    shrink: Callable[[int | None], None]
    shrinking: Callable[[], bool]  # returns True while the worker has not answered a request

    def __post_init__(self) -> None:
        self._order = Order.OK
        self.ending: Ending | None = None  # the decision to end the worker; None while it may go on
        self.request = ""  # reason of the latest request to shrink; empty if there was none

    @property
    def unused_promise_bytes(self) -> int:
        """Memory that the worker was promised and does not hold yet."""
        return max(0, self.promised_bytes - self.limiter.held_bytes)

    def look(self) -> Ending | None:
        shrinking = self.shrinking()  # before the memory is read: while it shrinks it may hold more, for a copy
        verdict = self.guard.judge(self.device.free_bytes(), self.limiter.held_bytes)
        if self.ending or (verdict.order is self._order and verdict.order is not Order.SHRINK):
            return self.ending
        if verdict.order is not self._order:
            logger.info("memory: %s %s", verdict.order, verdict.reason)
        self._order = verdict.order
        match verdict.order:
            case Order.SHRINK:
                self.request = verdict.reason
                assert verdict.held_bytes is not None
                self.shrink(None if shrinking else verdict.held_bytes)
            case Order.STOP:
                self.ending = Ending(How.STOP, Cause.MEMORY_NEEDED, verdict.reason)
            case Order.KILL:
                self.ending = Ending(How.CUT, Cause.MEMORY_NEEDED, verdict.reason)
        return self.ending
