"""How soon the automatic brake notices a slowdown, how often it brakes for nothing, and what its probes take.

No training runs: iteration times are drawn around one second, and an iteration that the brake lets be filled takes
longer by the true slowdown.  ``--noise`` says how the logarithm of a time varies: ``normal``; ``heavy``, by Student's
t of three degrees; ``outliers``, where one iteration in fifty takes 30% more on average; ``drift``, where the
machine itself becomes slower and faster; and ``lasting``, where seven tenths of it remain in the next iteration, as
on cores that others share.  ``at_once`` and ``later`` are the median and the nine-in-ten quantile of the
iterations from the beginning of a slowdown to the brake, where it begins with filling or after 700 iterations, when
probes have become rare; null is never.  ``unfilled`` is the share of the first 300 iterations that probes take.

    python scripts/benchmarks/bench_brake.py --json /tmp/brake.json
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.fill.rank.brake import Brake
from scripts.benchmarks.harness import arguments, check_above_zero, write_figures

LIMIT = 0.01
SECOND_NS = 1_000_000_000
NOISES = ("normal", "lasting", "heavy", "outliers", "drift")
SIGMAS = (0.005, 0.01, 0.02, 0.04)
SLOWDOWNS = (0.02, 0.05, 0.2)
LATER = 700  # iterations before a slowdown that begins later
LONGEST = 4000  # iterations of a training with a slowdown
FIRST_ITERATIONS = 300
_LASTS = 0.7
_TO_SIGMA = 0.6745 / 0.7649  # of Student's t with three degrees, whose median deviation is that of the normal's sigma


def noise_of(name: str, seed: int, count: int, sigma: float) -> np.ndarray:
    """Draw the logarithms of the times of so many iterations."""
    random = np.random.default_rng(seed)
    if name == "heavy":
        return random.standard_t(3, count) * sigma * _TO_SIGMA
    values = random.normal(0, sigma, count)
    if name == "lasting":
        values[1:] *= math.sqrt(1 - _LASTS**2)
        for at in range(1, count):
            values[at] += _LASTS * values[at - 1]
        return values
    if name == "outliers":
        return values + (random.random(count) < 0.02) * random.exponential(0.3, count)
    if name == "drift":
        return values + np.cumsum(random.normal(0, sigma / 8, count))
    return values


def simulate(noise: np.ndarray, seed: int, slowdown: float = 0.0, begins: int = 0) -> tuple[Brake, list[bool]]:
    """Run the brake over one training until it first brakes for the slowdown.

    Args:
        seed: also says at which number the iterations begin, so how far the first probe is.
        slowdown: by filling, from the iteration of this number after the first.

    Returns:
        The brake, and for each iteration whether it was filled.
    """
    brake, first, filled = Brake(LIMIT, 0, say=lambda text: None), 6 + seed % 128, []
    brake.jobs_settled()
    for number, value in enumerate(noise):
        filled.append(brake.iteration_started(first + number, number))
        slower = slowdown if filled[-1] and number >= begins else 0.0
        brake.observe(int(SECOND_NS * math.exp(value) * (1 + slower)), False)
        if slowdown and brake.events:
            break
    return brake, filled


def soon(found: Sequence[float]) -> list[float | None]:
    """Return the median and the nine-in-ten quantile; None for what never happens."""
    return [None if math.isinf(one) else float(one) for one in np.percentile(found, [50, 90], method="higher")]


def noticed(name: str, sigma: float, slowdown: float, begins: int, runs: int) -> list[float | None]:
    """Return how many iterations of the slowdown pass until it brakes."""
    found = []
    for seed in range(runs):
        noise = noise_of(name, 1000 + seed, LONGEST, sigma)
        _, filled = simulate(noise, seed, slowdown, begins)
        found.append(len(filled) - begins if len(filled) < LONGEST else math.inf)
    return soon(found)


def row(name: str, sigma: float, runs: int, quiet: int) -> dict[str, Any]:
    """Return the figures of one kind of noise."""
    per_run = 2500
    brakes, unfilled = 0, []
    for seed in range(max(1, quiet // per_run)):
        brake, filled = simulate(noise_of(name, 5000 + seed, per_run, sigma), seed)
        brakes += len(brake.events)
        unfilled.append(1 - np.mean(filled[:FIRST_ITERATIONS]))
    found: dict[str, Any] = {"noise": name, "sigma": sigma, "unfilled": round(float(np.mean(unfilled)), 4)}
    found["brakes_for_nothing"] = brakes
    for when, begins in (("at_once", 0), ("later", LATER)):
        found[when] = {f"{slow:g}": noticed(name, sigma, slow, begins, runs) for slow in SLOWDOWNS}
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--noise", nargs="+", choices=NOISES, default=NOISES)
    parser.add_argument("--runs", type=int, default=60, help="trainings per slowdown (default: 60)")
    parser.add_argument("--quiet-iterations", type=int, default=500_000, help="without a slowdown (default: 500000)")
    options = parser.parse_args()
    check_above_zero(parser, options, "runs", "quiet_iterations")
    rows = []
    for name in options.noise:
        for sigma in SIGMAS:
            rows.append(row(name, sigma, options.runs, options.quiet_iterations))
            print(rows[-1], flush=True)
    summary = {
        "brakes_for_nothing": sum(one["brakes_for_nothing"] for one in rows),
        "iterations_without_slowdown": len(rows) * options.quiet_iterations,
    }
    write_figures(options.json, summary, rows=rows)


if __name__ == "__main__":
    main()
