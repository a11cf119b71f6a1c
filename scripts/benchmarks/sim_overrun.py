"""What filling further into uncertain ends costs and gains: harvest against overruns, by the length of a step.

The bubbles of a real run are filled again in virtual time, by the runtime's own predictor and step loop, on a device
that does not preempt: a step that the end of its bubble catches runs on, and the main job waits for it.  Per length of
a step and --fill-overrun: the harvest ratio, and what steps ran on after bubbles, as a share of the iterations' time,
summed over the ranks: that is how much slower the training would be if all ranks' delays added up.

    python scripts/benchmarks/sim_overrun.py RUN --json docs/benchmarks/overrun.json --png docs/images/overrun.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megatron.fill.errors import FillError
from megatron.fill.pipeline.timeline import Wait
from megatron.fill.rank.rule import FillRule
from megatron.fill.records import last_segment
from megatron.fill.types import CycleKey, RankRecord
from scripts.benchmarks.studies.truth.replay import PlayedIteration, open_bubbles, replay
from scripts.benchmarks.studies.truth.steps import StepTimes

STEPS_MS = (2.0, 5.0, 10.0, 20.0, 50.0)
OVERRUNS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)  # percent
_KEY = CycleKey("as recorded", 1)


def iterations_of(record: RankRecord) -> list[PlayedIteration]:
    """The training iterations of one rank, with its waits in them, as they were."""
    starts = {one.iteration: one.start_ns for one in record.iterations}
    training = [bubble for bubble in record.bubbles if not bubble.forward_only and bubble.iteration in starts]
    played = []
    for number, bubbles in groupby(training, key=lambda bubble: bubble.iteration):
        start_ns = starts[number]
        waits = [Wait(one.kind, one.start_ns - start_ns, one.end_ns - start_ns) for one in bubbles]
        played.append(PlayedIteration(number, start_ns, waits))
    return played


def fill(record: RankRecord, step_ms: float, overrun: float, stages: int, noise: float) -> tuple[float, float, float]:
    """Fill one rank's bubbles; seconds of fillable bubbles, in steps, and overrun."""
    rule = FillRule(overrun=overrun / 100, stages=stages)
    opened = open_bubbles(iterations_of(record), _KEY, rule)
    lengths = np.random.default_rng(0).lognormal(0.0, noise, 997) * step_ms * 1e6
    times = StepTimes(tuple(int(ns) for ns in lengths), wakes_ns=(150_000,), gap_ns=10_000)
    done = replay(opened, times, preemptive=False)
    first = opened.bubbles[0].iteration + rule.warmup
    fillable_ns = sum(bubble.duration_ns for bubble in opened.bubbles if bubble.iteration >= first)
    harvested_ns = sum(use.harvested_ns for use in done.uses)
    return fillable_ns / 1e9, harvested_ns / 1e9, sum(use.overrun_ns for use in done.uses) / 1e9


def study(run: Path, steps_ms: Sequence[float], overruns: Sequence[float], noise: float) -> list[dict[str, Any]]:
    """A row per length of a step and setting.

    Raises:
        FillError: there is no run in that folder.
    """
    records = list(last_segment(run).records())
    if not records or not all(record.bubbles for record in records):
        raise FillError(f"{run}: no records of ranks with bubbles; expected the folder of a run (--fill-report)")
    rule = FillRule()
    counted = [one.end_ns - one.start_ns for one in records[0].iterations[rule.warmup :]]
    rows = []
    for step_ms in steps_ms:
        for overrun in overruns:
            found = [fill(record, step_ms, overrun, record.info.stages, noise) for record in records]
            fillable_s, harvested_s, overrun_s = (sum(column) for column in zip(*found, strict=True))
            rows.append(
                {
                    "step_ms": step_ms,
                    "fill_overrun": overrun,
                    "harvest_ratio": harvested_s / fillable_s,
                    "slowdown": overrun_s / (sum(counted) / 1e9),
                }
            )
    return rows


def print_study(rows: Sequence[dict[str, Any]]) -> None:
    print("harvest ratio, overruns of all ranks as a share of the iterations' time")
    overruns = sorted({row["fill_overrun"] for row in rows})
    for row in rows:
        if row["fill_overrun"] == overruns[0]:
            print(f"steps of {row['step_ms']:g} ms")
        print(f"  --fill-overrun {row['fill_overrun']:<5g} {row['harvest_ratio']:.3f}  {row['slowdown']:.2%}")


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Harvest over slowdown, a line for each length of a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=110, facecolor="white", layout="constrained")
    axes = figure.subplots()
    palette = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
    for place, step_ms in enumerate(sorted({row["step_ms"] for row in rows})):
        line = [row for row in rows if row["step_ms"] == step_ms]
        axes.plot(
            [100 * row["slowdown"] for row in line],
            [row["harvest_ratio"] for row in line],
            marker="o",
            markersize=4,
            color=palette[place % len(palette)],
            label=f"{step_ms:g} ms",
        )
        for row in line:
            if row["fill_overrun"] == 0.5:
                axes.plot(
                    100 * row["slowdown"], row["harvest_ratio"], "o", markersize=10, fillstyle="none", color="#333333"
                )
    axes.set_xlabel("overruns of all ranks, % of the iterations' time")
    axes.set_ylabel("harvest ratio")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(title="steps of", frameon=False, loc="lower right")
    axes.set_title("What filling further costs and gains (ringed: --fill-overrun 0.5, the default)", fontsize=10)
    figure.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--steps-ms", type=float, nargs="+", default=STEPS_MS, help="lengths of steps")
    parser.add_argument("--overruns", type=float, nargs="+", default=OVERRUNS, help="values of --fill-overrun, percent")
    parser.add_argument("--noise", type=float, default=0.05, help="of the steps: deviation over mean (default: 0.05)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    parser.add_argument("--png", metavar="FILE", type=Path, help="draw them here")
    options = parser.parse_args()
    if min(options.steps_ms) <= 0 or min(options.overruns) < 0 or options.noise < 0:
        parser.error("expected steps above 0 ms, and neither --overruns nor --noise below 0")
    try:
        rows = study(options.run, options.steps_ms, sorted(set(options.overruns)), options.noise)
    except FillError as error:
        parser.error(str(error))
    print_study(rows)
    if options.json:
        content = {"command": "python scripts/benchmarks/sim_overrun.py " + " ".join(sys.argv[1:]), "rows": rows}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if options.png:
        draw(options.png, rows)


if __name__ == "__main__":
    main()
