"""A job's progress: piecewise linear in time, with its last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor, inf, isfinite

from megatron.fill.wings.sim.cluster.rates import Fit


@dataclass(slots=True, eq=False)
class SimulatedAttempt:
    """A job from its claim to the end of that claim."""

    job: int  # number of the job
    work: float  # total work of the job
    kept: float  # work contained in the last checkpoint before ``since_s``, perhaps of an earlier attempt
    device: int  # number of the device
    tail: bool  # True if the job has the tail seat
    fit: Fit
    claimed_s: float
    checkpoint_s: float  # seconds between checkpoints, from the first step on
    token: int  # number that is new for every claim and every change of rate; events with another one are outdated
    started_s: float | None = None  # time of the first step; None before it
    done: float = field(init=False)  # work done by ``since_s``; later work is done at ``rate`` per second
    since_s: float = field(init=False)
    rate: float = 0.0
    due_s: float = inf  # time at which a resident job will be done; its rate never changes

    def __post_init__(self) -> None:
        self.done, self.since_s = self.kept, self.claimed_s

    def begin(self, now_s: float) -> None:
        """Record the start of the first step."""
        self.started_s = self.since_s = now_s

    def advance(self, now_s: float) -> None:
        """Update the work done and saved to ``now_s``."""
        if self.started_s is None:
            return
        if isfinite(self.checkpoint_s):
            last_s = self.started_s + floor((now_s - self.started_s) / self.checkpoint_s) * self.checkpoint_s
            if self.since_s <= last_s <= now_s:
                self.kept = self._done_at(last_s)
        self.done = self._done_at(now_s)
        self.since_s = now_s

    def go_on_at(self, rate: float, now_s: float) -> None:
        """Change the rate from ``now_s`` on."""
        self.advance(now_s)
        self.rate = rate

    @property
    def end_s(self) -> float:
        """Time at which the job will be done at its present rate; infinity for never."""
        return self.since_s + (self.work - self.done) / self.rate if self.rate else inf

    def _done_at(self, time_s: float) -> float:
        return min(self.work, self.done + self.rate * (time_s - self.since_s))


class Usage:
    """Device seconds inside steps per user: the quantity that fair sharing counts, as in the runtime."""

    def __init__(self) -> None:
        self._had: dict[str, tuple[float, float, float]] = {}  # seconds, by when, and seconds per second since then

    def change(self, user: str, by: float, now_s: float) -> None:
        """Increase the user's consumption by ``by`` device seconds per second from ``now_s`` on."""
        used_s, then_s, speed = self._had.get(user, (0.0, now_s, 0.0))
        self._had[user] = (used_s + speed * (now_s - then_s), now_s, speed + by)

    def used_s(self, now_s: float) -> dict[str, float]:
        return {user: used + speed * (now_s - then_s) for user, (used, then_s, speed) in self._had.items()}
