"""The decision whether a tail job, which gets the time that another job leaves on a device, moves to an idle device.

Jobs move only in this direction, from a tail to a whole device.  So each move reduces the number of idle devices, and
no two moves can undo each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

_FASTER = 1.25  # least ratio of the speeds, since both are estimates
_PAUSES = 2.0  # duration of a move in start-up times: the job is saved, stopped, claimed, started and loaded


@dataclass(frozen=True, slots=True)
class Prospect:
    """A tail job, and its expected speed on an idle device.

    Attributes:
        job: number of the job.
        speed: current speed, per wall-clock second; in any unit, the same as ``elsewhere``.
        elsewhere: expected speed on the idle device.
        left_s: remaining time where it is; infinity if it makes no progress there, None if unknown.
        ran_s: time that it has run there.
        startup_s: start-up time of its worker.
    """

    job: int
    speed: float
    elsewhere: float
    left_s: float | None
    ran_s: float
    startup_s: float

    @property
    def gain_s(self) -> float:
        """The time in s by which the job would be done earlier, the move's duration included; negative if later.

        A job whose remaining time is unknown is expected to run as long again as it has.
        """
        if not self.elsewhere > 0:
            return -inf
        stay_s = self.ran_s if self.left_s is None else self.left_s
        return stay_s * (1 - self.speed / self.elsewhere) - _PAUSES * self.startup_s

    @property
    def worth_it(self) -> bool:
        """True if the gain is larger than the move's duration, and the device is considerably faster."""
        return self.elsewhere >= _FASTER * self.speed and self.gain_s > _PAUSES * self.startup_s


def best_move(prospects: Sequence[Prospect]) -> Prospect | None:
    """The move with the largest gain; None if no move is worth it."""
    return max((one for one in prospects if one.worth_it), key=lambda one: one.gain_s, default=None)
