"""A side task of one's own: estimates pi.  monte_carlo.yaml runs it."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.fill import SideTask


class MonteCarloPi(SideTask):
    """Throws points at the unit square and counts those in the quarter circle."""

    unit = "points"

    def create(self, steps: int = 1000, points: int = 100_000) -> None:  # the args of the jobs file
        self.steps, self.points = steps, points
        self.done = self.inside = 0
        self.context.total_work = float(steps * points)

    def run_next_step(self) -> float:  # about 1 ms
        if self.done >= self.steps:
            raise StopIteration  # the job has succeeded
        x, y = np.random.default_rng(self.done).random((2, self.points))
        self.inside += int((x * x + y * y < 1).sum())
        self.done += 1
        return float(self.points)

    def pause(self) -> None:  # the bubble is about to end
        if self.done:
            self.context.report(pi=4 * self.inside / (self.done * self.points))

    def state_dict(self) -> dict[str, Any]:  # these two make the task resumable; both are optional
        return {"done": self.done, "inside": self.inside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.inside = state["done"], state["inside"]
