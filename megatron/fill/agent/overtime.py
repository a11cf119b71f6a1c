"""Work outside bubbles: a little is a worker's start, its checkpoints and its ends of steps; more is an offence."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron.fill.pages.gate import SharedGateReader

_ALLOWANCE_S = 30.0  # of CPU time: to import what a large model needs, and to make it
_SHARE = 0.05  # of the time that passes, from then on
_LAST_S = 3.0  # of debt, which one that is stopped outside bubbles cannot come to


class Overtime:
    """Keeps one worker's account of CPU time outside bubbles, all its processes together.

    Where a look finds a bubble that was open meanwhile, only what is more than its cores could do in that bubble
    certainly was outside of it; where none was, all of it.

    Args:
        busy_s: the CPU time that the worker's processes have had in all.
        cores: that it may use while a bubble is open.
        clock: seconds, monotonic.
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
        """Bring the account up to date; called a few times a second."""
        now_s, busy_s, open_ns = self._clock(), self._busy_s(), self._gate.open_ns()
        if self._at is not None:
            then_s, before_s, opened_ns = self._at
            inside_s = self._cores * (open_ns - opened_ns) / 1e9
            outside_s = max(0.0, busy_s - before_s - inside_s)
            self._left_s = min(_ALLOWANCE_S, self._left_s + _SHARE * (now_s - then_s) - outside_s)
        self._at = now_s, busy_s, open_ns

    @property
    def overdrawn(self) -> bool:
        """Whether it is to be stopped outside bubbles."""
        return self._left_s < 0

    @property
    def verdict(self) -> str:
        """Why it must end: it went on although it was stopped; empty if it need not."""
        if self._left_s > -_LAST_S:
            return ""
        used = f"{_ALLOWANCE_S + _LAST_S:g} s of CPU time outside bubbles"
        return f"it used more than {used}, though it was stopped there"
