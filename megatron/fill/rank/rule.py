"""When a bubble is filled, and for how long: one value for the rank, its relay, and what replays them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FillRule:
    """How much is known before a bubble is filled, and what its filling may cost.

    Attributes:
        warmup: observations of a bubble before anything is predicted for it.
        quantile: which quantile of the recent durations is the base of what a bubble lasts at least, 0 to 1.
        margin: how much earlier than that it is predicted to end, in spreads (median less the quantile).
        window: how many recent durations count.
        tolerance: by which factor a duration must miss the prediction to be taken for a change of the cycle and not
            for noise.
        overrun: by how much steps that are caught by the ends of bubbles may make an iteration longer in expectation,
            as a share of it; 0 ends every step before even a short bubble does.
        stages: among as many that is divided, for their delays add up.
        replicas: the ranks of each stage, which meet in every iteration and so wait for the latest of them
            (``predictor.among_replicas``).
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


# A rank's receive spins on the GPU while it waits.  Under time-slicing its context so takes turns with a worker's step,
# and what arrives while the worker has its turn moves in the next one.  Until somebody has measured how long a turn is,
# 2 ms are assumed: one is kept free at the end of a bubble, and one of each fits before.
TIMESLICED = FillRule(min_bubble_ns=5_000_000, guard_ns=2_000_000)
