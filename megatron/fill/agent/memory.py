"""Device memory: the cap of each worker, and the memory that it must give back when the training needs more.

The training needs more memory than in its usual cycle when it evaluates, or when a longer sequence comes.  It is never
asked to wait: a margin stays free at all times, and when the training grows into it, workers must free memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from megatron.fill.agent.ending import Ending, How, NotStarted
from megatron.fill.device.port import Limiter, WorkerDevice
from megatron.fill.display import mib
from megatron.fill.planner.held import why_no_memory
from megatron.fill.profiles import BubbleCycle
from megatron.fill.status import Cause, JobState, Status

logger = logging.getLogger("pipefill.agent")

_LAST = 4  # with less than the margin divided by this free, a worker is killed without being asked to shrink


@dataclass(eq=False, repr=False)
class DeviceMemory:
    """The memory of one device, and the workers that share it with the training; for any thread."""

    device: WorkerDevice
    margin_bytes: int  # memory that has to stay free
    patience_s: float  # time that a worker has to give memory back once it is asked

    def __post_init__(self) -> None:
        self.shares: list[MemoryShare] = []  # of the workers that run

    @property
    def kept_bytes(self) -> int:
        """Memory that has to stay free where a worker starts, and what the worker takes beyond its allocations."""
        return self.margin_bytes + self.device.overhead_bytes

    def cap(self, job_bytes: int | None, cycle: BubbleCycle | None) -> int:
        """Return the memory in bytes that another worker may hold.

        Args:
            job_bytes: memory that the job asks for; None for as much as there is.
            cycle: the bubble cycle, with the memory that was recently free in each bubble; no more counts than is free
                now.  Memory that a job has given back since then counts once the rank has published its cycle again,
                since the training may have grown in the meantime.

        Raises:
            NotStarted: it is nothing, or less than the job asks for.
        """
        free_bytes = min(
            [self.device.free_bytes(), *(slot.free_bytes for slot in (cycle.slots if cycle is not None else ()))]
        )
        others_bytes = sum(share.unused_promise_bytes for share in self.shares.copy())
        if reason := why_no_memory(free_bytes, self.kept_bytes, job_bytes, others_bytes):
            raise NotStarted(Status(JobState.QUEUED, Cause.NO_MEMORY, reason))
        return free_bytes - self.kept_bytes - others_bytes if job_bytes is None else job_bytes

    @property
    def taken_bytes(self) -> int:
        """Memory that the workers hold or were promised."""
        return sum(max(share.promised_bytes, share.limiter.held_bytes) for share in self.shares.copy())

    def room_bytes(self, cycle: BubbleCycle) -> int:
        """Return the memory in bytes for a worker that asks for no particular amount."""
        try:
            return self.cap(None, cycle)
        except NotStarted:
            return 0


@dataclass(eq=False, repr=False)
class MemoryShare:
    """Watches how much of the device is free while one worker runs, which is this context (Watcher).

    When less than the margin is free, the worker is asked to shrink, and stopped if it does not in time.

    Any thread may read ``unused_promise_bytes``; the rest is for the one that watches the worker.
    """

    memory: DeviceMemory
    limiter: Limiter
    promised_bytes: int  # memory that the job asked for; 0 if it asked for no particular amount
    # Asks the worker to hold at most this many bytes; None repeats the latest request.
    shrink: Callable[[int | None], None]
    shrinking: Callable[[], bool]  # returns True while the worker has not answered a request
    clock: Callable[[], float] = time.monotonic  # monotonic time in seconds

    def __post_init__(self) -> None:
        self._since_s: float | None = None  # time since which less than the margin is free
        self.ending: Ending | None = None  # the decision to end the worker; None while it may go on
        self.request = ""  # reason of the latest request to shrink; empty if there was none

    def __enter__(self) -> Self:
        self.memory.shares.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.shares.remove(self)

    @property
    def unused_promise_bytes(self) -> int:
        """Memory that the worker was promised and does not hold yet."""
        return max(0, self.promised_bytes - self.limiter.held_bytes)

    def look(self) -> Ending | None:
        shrinking = self.shrinking()  # before the memory is read: while it shrinks it may hold more, for a copy
        margin_bytes, patience_s = self.memory.margin_bytes, self.memory.patience_s
        free_bytes, held_bytes = self.memory.device.free_bytes(), self.limiter.held_bytes
        if self.ending is not None:
            return self.ending
        if free_bytes >= margin_bytes or held_bytes <= 0:  # without memory it cannot free any
            self._since_s = None
            return None
        now_s = self.clock()
        reason = f"the main job needs the memory: {mib(free_bytes)} free of a margin of {mib(margin_bytes)}"
        if self._since_s is None:
            self._since_s = now_s
            logger.info("%s", reason)
        if free_bytes * _LAST < margin_bytes:
            self.ending = Ending(How.CUT, Cause.MEMORY_NEEDED, reason)
        elif now_s - self._since_s >= patience_s:
            reason += f", and the worker did not shrink within {patience_s:g} s"
            self.ending = Ending(How.STOP, Cause.MEMORY_NEEDED, reason)
        else:
            self.request = reason
            self.shrink(None if shrinking else max(0, held_bytes - (margin_bytes - free_bytes)))
        return self.ending
