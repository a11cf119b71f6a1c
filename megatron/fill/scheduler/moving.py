"""Whether a job that gets what another one leaves of a device (a tail job) should move to a device that is idle.

Jobs move in this one direction only: from a tail to a whole device.  So each move makes one idle device fewer, and no
two moves can undo each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

_FASTER = 1.25  # at least so much: both speeds are estimates
_PAUSES = 2.0  # of a start-up's length: it is saved, stopped, taken, started and loaded


@dataclass(frozen=True, slots=True)
class Prospect:
    """A tail job, and what an idle device has to offer it.

    Attributes:
        speed: what it gets now, per wall-clock second; in any unit, the same as ``elsewhere``.
        elsewhere: what it would get on the idle device.
        left_s: how long it would go on where it is; infinity if it gets nothing there, None if nobody knows.
        ran_s: how long it has run there.
        startup_s: how long its worker took to start.
    """

    job: int
    speed: float
    elsewhere: float
    left_s: float | None
    ran_s: float
    startup_s: float

    @property
    def gain_s(self) -> float:
        """How much sooner it would be done, pause included; below 0 if later.

        A job of which nobody knows how much is left is expected to run as long again as it has.
        """
        if not self.elsewhere > 0:
            return -inf
        stay_s = self.ran_s if self.left_s is None else self.left_s
        return stay_s * (1 - self.speed / self.elsewhere) - _PAUSES * self.startup_s

    @property
    def worth_it(self) -> bool:
        """Whether the gain is beyond doubt: larger than what the move costs, and not for a little more speed only."""
        return self.elsewhere >= _FASTER * self.speed and self.gain_s > _PAUSES * self.startup_s


def best_move(prospects: Sequence[Prospect]) -> Prospect | None:
    """The move that gains most; None if none is worth it."""
    return max((one for one in prospects if one.worth_it), key=lambda one: one.gain_s, default=None)
