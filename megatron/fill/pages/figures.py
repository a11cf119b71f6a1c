"""The figures of a run that its agent leaves on the control page, for Megatron's own writers."""

from __future__ import annotations

from typing import NamedTuple


class Figures(NamedTuple):
    """Figures of all ranks since the start of the training; NaN if not known.

    Attributes:
        slowdown, slowdown_low, slowdown_high: slowdown of the training by filling, with its 95% interval; 0.01 is 1%.
    """

    bubble_share: float
    harvest_ratio: float
    slowdown: float
    slowdown_low: float
    slowdown_high: float
    jobs_done: float
