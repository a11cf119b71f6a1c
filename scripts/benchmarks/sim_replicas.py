"""What filling costs a training of many replicas, whose ranks wait for the latest of them in every iteration.

The bubbles of a real run are filled again in virtual time, by the runtime's own predictor and step loop, on a device
that does not preempt, many times with other lengths of steps and with its iterations in another order.  A replica's
iteration lasts as long as it did, and longer by the delays of all stages together; a training's iteration is the
longest of R such.  How much longer filling makes it in the mean follows from the distribution of one.  Once with the
rule that knows of the replicas, and once with one that does not.  ``--noise`` draws all times nearer to their medians:
the replicas of a cluster of GPUs vary less than the two ranks of a small machine.

    python scripts/benchmarks/sim_replicas.py RUN --json docs/benchmarks/replicas.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.errors import FillError
from megatron.fill.pipeline.timeline import Wait
from megatron.fill.rank.rule import FillRule
from megatron.fill.records import last_segment
from megatron.fill.types import CycleKey, RankRecord
from scripts.benchmarks.sim_overrun import iterations_of
from scripts.benchmarks.studies.truth.replay import PlayedIteration, open_bubbles, replay
from scripts.benchmarks.studies.truth.steps import StepTimes

REPLICAS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STEPS_MS = (2.0, 10.0, 50.0)
NOISE = (0.05, 0.2, 1.0)
_STEP_NOISE = 0.05  # of the steps: deviation over mean
_KEY = CycleKey("as recorded", 1)


@dataclass(frozen=True, slots=True)
class Stage:
    """One rank of the run, with the waits of its iterations."""

    record: RankRecord
    waits: Sequence[Sequence[Wait]]


def stages_of(records: Sequence[RankRecord], noise: float) -> tuple[list[Stage], np.ndarray]:
    """The ranks, and how long the iterations took that all of them have with the usual number of waits, in ns."""
    played = [{one.iteration: one.waits for one in iterations_of(record)} for record in records]
    usual = [Counter(map(len, waits.values())).most_common(1)[0][0] for waits in played]
    took_ns = {one.iteration: one.end_ns - one.start_ns for one in records[0].iterations}
    whole = [
        number
        for number in sorted(took_ns)
        if all(len(waits.get(number, ())) == count for waits, count in zip(played, usual, strict=True))
    ]
    stages = []
    for record, waits in zip(records, played, strict=True):
        times = np.array([[(one.start_ns, one.end_ns) for one in waits[number]] for number in whole])
        drawn = drawn_in(times, noise)
        kinds = [one.kind for one in waits[whole[0]]]
        kept = [[Wait(kind, *ends) for kind, ends in zip(kinds, row, strict=True)] for row in drawn.tolist()]
        stages.append(Stage(record, kept))
    return stages, drawn_in(np.array([took_ns[number] for number in whole]), noise)


def drawn_in(times: np.ndarray, noise: float) -> np.ndarray:
    """Times with a share of their distances from the median."""
    usual = np.median(times, axis=0)
    return np.rint(usual + noise * (times - usual)).astype(np.int64)


def filled(
    stage: Stage, longest_ns: np.ndarray, step_ms: float, rule: FillRule, orders: Sequence[Sequence[int]], seed: int
) -> tuple[list[np.ndarray], float]:
    """Fill one rank's bubbles.

    Args:
        longest_ns: of the replicas' iterations, a row for each order.
        orders: of its iterations, one for each time that it is filled.

    Returns:
        The delay of each iteration after the warm-up in ns, for each order; and the harvest ratio.
    """
    delays, harvested_ns, fillable_ns = [], 0, 0
    for number, order in enumerate(orders):
        starts_ns = np.concatenate(([0], np.cumsum(longest_ns[number])))
        again = [PlayedIteration(at, int(starts_ns[at - 1]), stage.waits[one]) for at, one in enumerate(order, 1)]
        opened = open_bubbles(again, _KEY, rule)
        lengths = np.random.default_rng((seed, number)).lognormal(0.0, _STEP_NOISE, 997) * step_ms * 1e6
        times = StepTimes(tuple(int(ns) for ns in lengths), wakes_ns=(150_000,), gap_ns=10_000)
        done = replay(opened, times, preemptive=False)
        iteration_of = {bubble.seq: bubble.iteration for bubble in opened.bubbles if bubble.seq}
        late_ns: defaultdict[int, int] = defaultdict(int)
        for use in done.uses:
            late_ns[iteration_of[use.seq]] += use.overrun_ns
        delays.append(np.array([late_ns[at] for at in range(rule.warmup + 1, len(order) + 1)]))
        harvested_ns += sum(use.harvested_ns for use in done.uses)
        fillable_ns += sum(one.duration_ns for one in opened.bubbles if one.iteration > rule.warmup)
    return delays, harvested_ns / fillable_ns


def mean_of_largest(values: np.ndarray, count: int) -> float:
    """The expected maximum of so many independent draws from the values."""
    ordered = np.sort(values)
    below = (np.arange(len(ordered) + 1) / len(ordered)) ** count
    return float(np.sum(ordered * np.diff(below)))


def study(
    run: Path, steps_ms: Sequence[float], replicas: Sequence[int], overrun: float, turns: int, noise: float
) -> list[dict[str, Any]]:
    """A row per length of a step and number of replicas.

    Raises:
        FillError: there is no run in that folder.
    """
    records = list(last_segment(run).records())
    if not records or not all(record.bubbles for record in records):
        raise FillError(f"{run}: no records of ranks with bubbles; expected the folder of a run (--fill-report)")
    stages, took_ns = stages_of(records, noise)
    random = np.random.default_rng(0)
    orders = [random.permutation(len(took_ns)).tolist() for _ in range(turns)]
    base = FillRule(overrun=overrun / 100, stages=records[0].info.stages)
    rows = []
    for step_ms in steps_ms:
        for number in replicas:
            # The iteration of the training is the longest of this replica's and the others'.
            own_ns = took_ns[np.array(orders)]
            others = random.choice(took_ns, (max(1, number - 1), *own_ns.shape)).max(axis=0)
            longest_ns = np.maximum(own_ns, others) if number > 1 else own_ns
            row: dict[str, Any] = {"noise": noise, "step_ms": step_ms, "replicas": number}
            for name, rule in (("", replace(base, replicas=number)), ("_undivided", base)):
                found = [filled(stage, longest_ns, step_ms, rule, orders, at) for at, stage in enumerate(stages)]
                late_ns = np.concatenate(
                    [np.sum(of_stages, axis=0) for of_stages in zip(*(d for d, _ in found), strict=True)]
                )
                alone_ns = own_ns[:, rule.warmup :].ravel()
                usual_ns = mean_of_largest(alone_ns, number)
                row[f"slowdown{name}"] = mean_of_largest(alone_ns + late_ns, number) / usual_ns - 1
                row[f"harvest_ratio{name}"] = float(np.mean([ratio for _, ratio in found]))
            rows.append(row)
            print(
                f"noise {noise:3g}, steps of {step_ms:4g} ms, {number:4} replicas: slowdown {row['slowdown']:6.2%}, "
                f"harvest {row['harvest_ratio']:.3f}; not divided {row['slowdown_undivided']:6.2%}, "
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
    parser.add_argument(
        "--noise", type=float, nargs="+", default=NOISE, help="shares of the times' distances from usual"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    options = parser.parse_args()
    if (
        min(options.steps_ms) <= 0
        or min(options.replicas) < 1
        or options.overrun < 0
        or options.turns < 1
        or min(options.noise) < 0
    ):
        parser.error("expected steps above 0 ms, replicas and turns from 1 on, --overrun and --noise not below 0")
    try:
        rows = [
            row
            for noise in options.noise
            for row in study(options.run, options.steps_ms, options.replicas, options.overrun, options.turns, noise)
        ]
    except FillError as error:
        parser.error(str(error))
    if options.json:
        content = {"command": "python scripts/benchmarks/sim_replicas.py " + " ".join(sys.argv[1:]), "rows": rows}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
