"""The figures of the whole run, for Megatron's own writers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.fill.agent.context import Attendant
from megatron.fill.pages.control import ControlPage, Figures

if TYPE_CHECKING:
    from megatron.fill.records.live import LiveSegment


class ShownFigures(Attendant):
    """Leaves the figures on the control page of a rank that has asked for them, which is the one with the writers."""

    def __init__(self, run_dir: Path, control: ControlPage) -> None:
        self._run_dir, self._control = run_dir, control
        self._live: LiveSegment | None = None  # None until the rank has asked

    def keep(self) -> None:
        if not self._control.asked:
            return
        # Every agent has this attendant, and few are asked.
        from megatron.fill.records.live import LiveSegment
        from megatron.fill.records.segment import last_segment
        from megatron.fill.records.slowdown import Estimate

        if self._live is None:
            self._live = LiveSegment(last_segment(self._run_dir))
        live = self._live
        live.look()
        slowdown = live.slowdown or Estimate(math.nan, math.nan, math.nan, 0)
        self._control.show(Figures(live.bubble_share, live.harvest_ratio, *slowdown[:3], live.jobs_done))
