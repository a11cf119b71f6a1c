"""What filling costs a training of many replicas, whose ranks wait for the latest of them in every iteration.

The bubbles of a real run are filled again in virtual time, by the runtime's own predictor and step loop, on a device
that does not preempt, many times with other lengths of steps and with its iterations in another order.  The delay of an
iteration is that of all stages together; of R replicas it is the largest of R such delays, whose mean follows from the
distribution of one.  Once with the rule that knows of the replicas, and once with one that does not.

    python scripts/benchmarks/sim_replicas.py RUN --json docs/benchmarks/replicas.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.errors import FillError
from megatron.fill.rank.rule import FillRule
from megatron.fill.records import last_segment
from megatron.fill.sim.truth.replay import PlayedIteration, open_bubbles, replay
from megatron.fill.sim.truth.steps import StepTimes
from megatron.fill.types import CycleKey, RankRecord
from scripts.benchmarks.sim_overrun import iterations_of

REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STEPS_MS = (2.0, 10.0, 50.0)
_NOISE = 0.05  # of the steps: deviation over mean
_KEY = CycleKey("as recorded", 1)


def played_again(iterations: Sequence[PlayedIteration], order: Sequence[int]) -> list[PlayedIteration]:
    """The same iterations in another order, one after the other."""
    periods = [after.start_ns - before.start_ns for before, after in pairwise(iterations)]
    start_ns, found = 0, []
    for number, at in enumerate(order, 1):
        found.append(replace(iterations[at], iteration=number, start_ns=start_ns))
        start_ns += periods[at]
    return found


def filled(
    record: RankRecord, step_ms: float, rule: FillRule, orders: Sequence[Sequence[int]], seed: int
) -> tuple[list[np.ndarray], float]:
    """Fill one rank's bubbles.

    Args:
        orders: of its iterations, one for each replica.

    Returns:
        The delay of each iteration after the warm-up in ns, for each replica; and the harvest ratio.
    """
    iterations = iterations_of(record)
    delays, harvested_ns, fillable_ns = [], 0, 0
    for number, order in enumerate(orders):
        opened = open_bubbles(played_again(iterations, order), _KEY, rule)
        lengths = np.random.default_rng((seed, number)).lognormal(0.0, _NOISE, 997) * step_ms * 1e6
        times = StepTimes(tuple(int(ns) for ns in lengths), wakes_ns=(150_000,), gap_ns=10_000)
        done = replay(opened, times, preemptive=False)
        iteration_of = {bubble.seq: bubble.iteration for bubble in opened.bubbles if bubble.seq}
        late_ns: defaultdict[int, int] = defaultdict(int)
        for use in done.uses:
            late_ns[iteration_of[use.seq]] += use.overrun_ns
        counted = range(rule.warmup + 1, len(order) + 1)
        delays.append(np.array([late_ns[number] for number in counted]))
        harvested_ns += sum(use.harvested_ns for use in done.uses)
        fillable_ns += sum(one.duration_ns for one in opened.bubbles if one.iteration > rule.warmup)
    return delays, harvested_ns / fillable_ns


def mean_of_largest(values: np.ndarray, count: int) -> float:
    """The expected maximum of so many independent draws from the values."""
    ordered = np.sort(values)
    below = (np.arange(len(ordered) + 1) / len(ordered)) ** count
    return float(np.sum(ordered * np.diff(below)))


def study(
    run: Path, steps_ms: Sequence[float], replicas: Sequence[int], overrun: float, turns: int
) -> list[dict[str, Any]]:
    """A row per length of a step and number of replicas.

    Raises:
        FillError: there is no run in that folder.
    """
    records = list(last_segment(run).records())
    if not records or not all(record.bubbles for record in records):
        raise FillError(f"{run}: no records of ranks with bubbles; expected the folder of a run (--fill-report)")
    count = min(len(record.iterations) for record in records) - 1
    random = np.random.default_rng(0)
    orders = [random.permutation(count).tolist() for _ in range(turns)]
    base = FillRule(overrun=overrun / 100, stages=records[0].info.stages)
    usual_ns = np.mean([one.end_ns - one.start_ns for one in records[0].iterations])
    rows = []
    for step_ms in steps_ms:
        for number in replicas:
            row: dict[str, Any] = {"step_ms": step_ms, "replicas": number}
            for name, rule in (("", replace(base, replicas=number)), ("_undivided", base)):
                stages = [filled(record, step_ms, rule, orders, at) for at, record in enumerate(records)]
                late = np.concatenate(
                    [np.sum(of_stages, axis=0) for of_stages in zip(*(d for d, _ in stages), strict=True)]
                )
                row[f"slowdown{name}"] = mean_of_largest(late, number) / usual_ns
                row[f"harvest_ratio{name}"] = float(np.mean([ratio for _, ratio in stages]))
            rows.append(row)
            print(
                f"steps of {step_ms:4g} ms, {number:4} replicas: slowdown {row['slowdown']:6.2%}, harvest "
                f"{row['harvest_ratio']:.3f}; not divided {row['slowdown_undivided']:6.2%}, "
                f"{row['harvest_ratio_undivided']:.3f}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--steps-ms", type=float, nargs="+", default=STEPS_MS, help="lengths of steps")
    parser.add_argument("--replicas", type=int, nargs="+", default=REPLICAS, help="numbers of replicas")
    parser.add_argument("--overrun", type=float, default=0.5, help="--fill-overrun, percent (default: 0.5)")
    parser.add_argument("--turns", type=int, default=20, help="how often the run is filled anew (default: 20)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    options = parser.parse_args()
    if min(options.steps_ms) <= 0 or min(options.replicas) < 1 or options.overrun < 0 or options.turns < 1:
        parser.error("expected steps above 0 ms, replicas and turns from 1 on, and --overrun not below 0")
    try:
        rows = study(options.run, options.steps_ms, options.replicas, options.overrun, options.turns)
    except FillError as error:
        parser.error(str(error))
    if options.json:
        content = {"command": "python scripts/benchmarks/sim_replicas.py " + " ".join(sys.argv[1:]), "rows": rows}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
