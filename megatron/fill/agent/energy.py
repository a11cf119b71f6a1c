"""The energy that counts for a job, out of what its device uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, repr=False)
class EnergyShare:
    """The part of a device's energy for the time that one job had it.

    A counter is too slow for single bubbles, so the energy between two looks is divided by time: the job has the part
    in which its steps had the device, and the training the rest.  Parts of jobs that share a device never exceed
    the whole.
    """

    read: Callable[[], float | None]  # returns the device's counter in J, None if there is none
    had_ns: Callable[[], int]  # returns the time for which this attempt's steps have had it (``StepLog.device_ns``)
    clock_ns: Callable[[], int] = time.monotonic_ns

    def __post_init__(self) -> None:
        self._total_j, self._at_ns, self._counted_ns = self.read(), self.clock_ns(), self.had_ns()
        self.joules = None if self._total_j is None else 0.0  # the job's part so far; None without a counter

    def look(self) -> None:
        """Add what the job has had since the last look; a counter that does not answer is asked again at the next."""
        before_j, total_j, now_ns = self._total_j, self.read(), self.clock_ns()
        span_ns = now_ns - self._at_ns
        if before_j is None or total_j is None or span_ns <= 0:
            return
        # A bubble counts at its end, perhaps for more time than this span has: the rest counts for the next one.
        had_ns = min(span_ns, self.had_ns() - self._counted_ns)
        self.joules = (self.joules or 0.0) + max(0.0, total_j - before_j) * had_ns / span_ns
        self._counted_ns += had_ns
        self._total_j, self._at_ns = total_j, now_ns
