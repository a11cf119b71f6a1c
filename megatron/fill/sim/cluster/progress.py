"""How far a job is: piecewise linear in time, with what was saved last."""

from __future__ import annotations

from math import floor, inf, isfinite

from megatron.fill.sim.cluster.rates import Fit


class SimulatedAttempt:
    """A job from its claim to the end of that claim.

    Args:
        job: its number.
        work: how much there is to do in all.
        kept: how much of that was saved before.
        device: the device's number.
        tail: whether it has the tail seat.
        checkpoint_s: how often it is saved, from its first step on.

    Attributes:
        done: work that was done by ``since_s``; afterwards it goes on at ``rate`` per second.
        kept: work that a checkpoint has by then.
        started_s: its first step; None before that.
        due_s: of a resident job, when it will be done; its rate never changes.
        token: another number for every claim and every change of a rate: it tells events from overtaken ones.
    """

    __slots__ = (
        *("job", "work", "device", "tail", "fit", "claimed_s", "started_s"),
        *("done", "kept", "since_s", "rate", "due_s", "token", "_checkpoint_s"),
    )

    def __init__(
        self,
        job: int,
        work: float,
        kept: float,
        device: int,
        tail: bool,
        fit: Fit,
        claimed_s: float,
        checkpoint_s: float,
    ) -> None:
        self.job = job
        self.work = work
        self.device = device
        self.tail = tail
        self.fit = fit
        self.claimed_s = self.since_s = claimed_s
        self.started_s: float | None = None
        self.done = self.kept = kept
        self.rate = 0.0
        self.due_s = inf
        self.token = 0
        self._checkpoint_s = checkpoint_s

    def begin(self, now_s: float) -> None:
        """The first step runs."""
        self.started_s = self.since_s = now_s

    def advance(self, now_s: float) -> None:
        """Count what was done by now, and what was saved of it."""
        if self.started_s is None:
            return
        if isfinite(self._checkpoint_s):
            last_s = self.started_s + floor((now_s - self.started_s) / self._checkpoint_s) * self._checkpoint_s
            if self.since_s <= last_s <= now_s:
                self.kept = self._done_at(last_s)
        self.done = self._done_at(now_s)
        self.since_s = now_s

    def go_on_at(self, rate: float, now_s: float) -> None:
        """Another rate from now on."""
        self.advance(now_s)
        self.rate = rate

    @property
    def end_s(self) -> float:
        """When it will be done if the rate stays; infinity for never."""
        return self.since_s + (self.work - self.done) / self.rate if self.rate else inf

    def _done_at(self, time_s: float) -> float:
        return min(self.work, self.done + self.rate * (time_s - self.since_s))


class Usage:
    """Device seconds inside steps that each user had: what fair sharing counts, as the runtime does."""

    def __init__(self) -> None:
        self._had: dict[str, tuple[float, float, float]] = {}  # seconds, by when, and seconds per second since then

    def change(self, user: str, by: float, now_s: float) -> None:
        """From now on, ``by`` more device seconds per second are spent on the user's jobs."""
        used_s, then_s, speed = self._had.get(user, (0.0, now_s, 0.0))
        self._had[user] = (used_s + speed * (now_s - then_s), now_s, speed + by)

    def used_s(self, now_s: float) -> dict[str, float]:
        return {user: used + speed * (now_s - then_s) for user, (used, then_s, speed) in self._had.items()}
