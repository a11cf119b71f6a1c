"""When a bubble is filled, and for how long: one value for the rank, its relay, and what replays them."""

from __future__ import annotations

from dataclasses import dataclass
from math import log


@dataclass(frozen=True, slots=True)
class FillRule:
    """How much is known before a bubble is filled, and what its filling may cost.

    Attributes:
        warmup: observations of a bubble before anything is predicted for it.
        quantile: which quantile of the recent durations is the base of what a bubble lasts at least, 0 to 1.
        margin: how much earlier than that it is predicted to end, in spreads (median less the quantile), where no
            replicas wait for each other.
        window: how many recent durations count.
        tolerance: by which factor a duration must miss the prediction to be taken for a change of the cycle and not
            for noise.
        overrun: by how much steps that are caught by the ends of bubbles may make an iteration longer in expectation,
            as a share of it; 0 ends every step before even a short bubble does.
        stages: among as many that is divided, for their delays add up.
        replicas: the ranks of each stage, which meet in every iteration and so wait for the latest of them.  The
            expected maximum of as many delays is at most their sum, so ``overrun`` is divided among them too.
        min_bubble_ns: bubbles that are expected to be shorter are left alone.
        guard_ns: kept free at the end of every predicted bubble.
    """

    warmup: int = 5
    quantile: float = 0.1
    margin: float = 0.5
    window: int = 48
    tolerance: float = 1.3
    overrun: float = 0.005
    stages: int = 1
    replicas: int = 1
    min_bubble_ns: int = 1_000_000
    guard_ns: int = 0

    @property
    def early_spreads(self) -> float:
        """How much earlier than at its base quantile a bubble is predicted to end, in spreads.

        One in so many ends before its prediction.  Among replicas it is one in ``replicas`` times as many: with an
        exponential tail below the median, that is this much earlier.
        """
        return self.margin + log(self.replicas) / log(0.5 / self.quantile)


# A rank's receive spins on the GPU while it waits.  Under time-slicing its context so takes turns with a worker's step,
# and what arrives while the worker has its turn moves in the next one.  Until somebody has measured how long a turn is,
# 2 ms are assumed: one is kept free at the end of a bubble, and one of each fits before.
TIMESLICED = FillRule(min_bubble_ns=5_000_000, guard_ns=2_000_000)
