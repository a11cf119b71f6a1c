"""How soon the automatic brake notices a slowdown, and how often it brakes for nothing, over simulated iterations.

    python scripts/benchmarks/bench_brake.py --json docs/benchmarks/brake.json

No training runs: iteration times are drawn around one second with normal noise of their logarithm, and an iteration
that the brake lets be filled takes longer by the true slowdown.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from megatron.fill.rank.brake import Brake
from scripts.benchmarks.harness import arguments, write_figures

LIMIT = 0.01
FIRST = 6  # number of the first iteration after the warm-up
SECOND_NS = 1_000_000_000


def simulate(slowdown: float, noise: np.ndarray, until_braked: bool) -> Brake:
    """Run the brake over one training; it ends with the noise, or with the first brake."""
    brake = Brake(LIMIT, 0, say=lambda text: None)
    for number, value in enumerate(noise):
        filled = brake.iteration_started(FIRST + number, number)
        brake.observe(int(SECOND_NS * math.exp(value) * (1 + filled * slowdown)), False)
        if until_braked and brake.events:
            break
    return brake


def noticed(slowdown: float, sigma: float, runs: int, longest: int) -> dict[str, Any]:
    """How many iterations pass, from the first filled one on, until it brakes; over many runs."""
    found = []
    for seed in range(runs):
        noise = np.random.default_rng(seed).normal(0, sigma, longest)
        events = simulate(slowdown, noise, until_braked=True).events
        found.append(events[0].iteration - FIRST + 1 if events else math.inf)
    median, nine_in_ten = (float(value) for value in np.percentile(found, [50, 90], method="higher"))
    return {"slowdown": slowdown, "noise": sigma, "runs": runs, "median": median, "nine_in_ten": nine_in_ten}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=60, help="trainings per slowdown (default: 60)")
    parser.add_argument("--quiet-iterations", type=int, default=200_000, help="without a slowdown (default: 200000)")
    options = parser.parse_args()
    rows = [
        noticed(slowdown, sigma, options.runs, 5_000) for slowdown in (0.5, 0.3, 0.1, 0.03) for sigma in (0.05, 0.01)
    ]
    noise = np.random.default_rng(0).normal(0, 0.05, options.quiet_iterations)
    summary = {
        "brakes_for_nothing": len(simulate(0.0, noise, until_braked=False).events),
        "iterations_without_slowdown": options.quiet_iterations,
    }
    for row in rows:
        print("  ".join(f"{name} {value:g}" for name, value in row.items()))
    write_figures(options.json, summary, noticed=rows)


if __name__ == "__main__":
    main()
