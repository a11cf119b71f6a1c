"""The rule for filling a bubble: one value for the rank, its relay and the simulator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FillRule:
    """The conditions under which a bubble is filled, and the allowed cost of filling it."""

    warmup: int = 5  # number of observations of a bubble before it is predicted
    # Time subtracted from the low quantile of the recent durations, in spreads (median less the quantile).
    margin: float = 0.5
    window: int = 48  # number of recent durations that count
    # Allowed expected increase of an iteration by steps in flight at the ends of bubbles, as a share of the iteration;
    # with 0 every step ends before even a short bubble does.
    overrun: float = 0.005
    stages: int = 1  # number of stages among which the overrun is divided, since their delays add up
    # Number of ranks per stage, which synchronise in every iteration and so wait for the latest of them
    # (``predictor.among_replicas``).
    replicas: int = 1
    min_bubble_ns: int = 1_000_000  # least expected duration of a bubble that is filled
    guard_ns: int = 0  # time kept free at the end of every predicted bubble


# A rank's receive spins on the GPU while it waits.  So under time-slicing its context alternates with a worker's step,
# and data that arrives in the worker's time slice is moved in the next one.  The length of a slice has not been
# measured; 2 ms are assumed: one slice is kept free at the end of a bubble, and one of each context fits before that.
TIMESLICED = FillRule(min_bubble_ns=5_000_000, guard_ns=2_000_000)
