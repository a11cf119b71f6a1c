"""CPU time outside bubbles: starting, checkpoints and ends of steps need a little of it; more is a violation."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron.fill.pages.gate import SharedGateReader

_ALLOWANCE_S = 30.0  # CPU time in advance: to import a large model's libraries and to build it
_SHARE = 0.05  # CPU time granted per second that passes
_LAST_S = 3.0  # debt at which the worker is ended; stopped outside bubbles, it cannot come to that


class Overtime:
    """Account of one worker's CPU time outside bubbles, summed over its processes.

    From the CPU time between two looks, the open time of bubbles times ``cores`` is subtracted; only the rest was
    certainly outside.

    Args:
        busy_s: returns the total CPU time of the worker's processes.
        cores: number of cores that the worker may use while a bubble is open.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        busy_s: Callable[[], float],
        gate: SharedGateReader,
        cores: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy_s = busy_s
        self._gate = gate
        self._cores = cores
        self._clock = clock
        self._left_s = _ALLOWANCE_S
        self._at: tuple[float, float, int] | None = None  # the latest look

    def look(self) -> None:
        """Update the account; called a few times a second."""
        now_s, busy_s, open_ns = self._clock(), self._busy_s(), self._gate.open_ns()
        if self._at is not None:
            then_s, before_s, opened_ns = self._at
            inside_s = self._cores * (open_ns - opened_ns) / 1e9
            outside_s = max(0.0, busy_s - before_s - inside_s)
            self._left_s = min(_ALLOWANCE_S, self._left_s + _SHARE * (now_s - then_s) - outside_s)
        self._at = now_s, busy_s, open_ns

    @property
    def overdrawn(self) -> bool:
        """True if the worker must be stopped outside bubbles."""
        return self._left_s < 0

    @property
    def exceeded_s(self) -> float:
        """CPU time that the worker used outside bubbles, although it was stopped there, in s; 0 while it may go on."""
        return _ALLOWANCE_S + _LAST_S if self._left_s <= -_LAST_S else 0.0
