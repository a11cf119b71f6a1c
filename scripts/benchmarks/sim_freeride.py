"""FreeRide's study in the simulator: time increase and cost savings of its side tasks, by our rule and by its own.

GPT-like models of 1.2, 3.6 and 6 billion parameters in four 1F1B stages on four RTX 6000 Ada, with 4, 6 and 8
micro-batches. What FreeRide's artifact says, and in which file, is in
``scripts/benchmarks/studies/freeride/artifact.py``. The bubbles are the simulator's. They are filled in virtual time
by PipeFill's own predictor and step loop, and by FreeRide's reservations and polling (``reserving.py``). Tasks are
placed by FreeRide's Algorithm 1 in both cases.

Its formulas (ae/collect_experiment_data/analyze_cost.ipynb), with T the training's time, W the side work, Th its
throughput on the cheaper GPU, and P the prices:

    time increase I = (T_with - T_without) / T_without
    saving        S = (sum W / Th * P_3080 - (T_with - T_without) * P_ada) / (T_without * P_ada)

For single tasks the artifact prints the saving without subtracting the overhead, for the mixed workload with it; the
tables do the same.

Assumed, because the artifact does not say it: how much passes and steps vary (--noise, --step-noise); for 6B the
efficiency of 3.6B; and that an image is worth as much in every batch size, for Th is known of batches of 64 only.

    python scripts/benchmarks/sim_freeride.py --json docs/benchmarks/freeride-studies.json --png docs/images
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.benchmarks.studies.freeride import study as studies
from scripts.benchmarks.studies.freeride.draw import draw_study
from scripts.benchmarks.studies.freeride.study import saving
from scripts.benchmarks.studies.freeride.training import Rule, Varying

_BY = (*(rule.value for rule in Rule), "artifact")


def study(options: argparse.Namespace) -> dict[str, Any]:
    """All tables, and their summary."""
    varying = Varying(options.noise, options.step_noise, options.wake_us * 1000)
    found = studies.study(options.iterations, varying)
    return {"summary": summary(found), **found}


def summary(found: dict[str, Any]) -> dict[str, float]:
    """What can be compared with the artifact, flat."""
    compared = [row for row in found["tasks"] if row["artifact"]]
    figures = {}
    for by in _BY:
        alone = [saving(row, by) for row in compared if row["task"] != "mix"]
        figures[f"mean_saving_{by}"] = fmean(alone)
        for row in compared:
            name = row["task"].lower().replace(" ", "_")
            figures |= {f"{name}_saving_{by}": saving(row, by), f"{name}_increase_{by}": row[by]["increase"]}
    return figures


def print_study(found: dict[str, Any]) -> None:
    print("Iteration of 3.6B, seconds: micro-batches, artifact, simulated")
    for row in found["iterations"]:
        error = row["simulated_s"] / row["artifact_s"] - 1
        print(f"  {row['microbatches']}  {row['artifact_s']:.3f}  {row['simulated_s']:.3f}  {error:+.1%}")
    _print_placement(found["tasks"])
    print("\nTime increase I and saving S      our rule       FreeRide's rule   artifact")
    print("size  m task        bubbles      I       S        I       S        I       S")
    for row in found["tasks"]:
        print(f"{row['size']:5} {row['microbatches']} {row['task']:10} {row['bubble_share']:8.1%} {_figures(row)}")
    _print_bubble_time(found["tasks"])
    _print_mix(found["tasks"])
    print("\n3.6B, 4 micro-batches, by batch size; stages that are not named have too little")
    print("memory                                    our rule       FreeRide's rule")
    print("task      batch step ms  GiB  stages     I       S        I       S")
    for row in found["batches"]:
        stages = ",".join(str(stage) for stage, name in enumerate(row["runs"]) if name) or "none"
        print(
            f"{row['task']:9} {row['batch']:5} {row['step_s'] * 1e3:7.1f} {row['memory_bytes'] / 2**30:4.1f}"
            f"  {stages:6} {_figures(row)}"
        )
    for name in _BY:
        print(f"mean saving of the six, {name}: {found['summary'][f'mean_saving_{name}']:.2%}")


def _figures(row: dict[str, Any]) -> str:
    """I and S by each rule, and of the artifact where it has them."""
    return "  ".join(f"{row[by]['increase']:7.2%} {saving(row, by):7.2%}" for by in _BY if row.get(by))


def _print_placement(tasks: list[dict[str, Any]]) -> None:
    print("\nThe mixed workload, placed by Algorithm 1: stage")
    for size in dict.fromkeys(row["size"] for row in tasks):
        row = next(row for row in tasks if row["size"] == size and row["task"] == "mix")
        places = []
        for placed in row["placed"]:
            name, stage = placed["task"], placed["stage"]
            waits = "" if stage is None or row["runs"][stage] == name else " (waits)"
            places.append(f"{name} {'nowhere' if stage is None else stage}{waits}")
        print(f"  {size:5} {', '.join(places)}")


def _print_bubble_time(tasks: list[dict[str, Any]]) -> None:
    print("\nWhere the bubble time goes, 3.6B, 4 micro-batches (our rule / FreeRide's)")
    print("task            in steps         runtime         too little time  of memory")
    for row in tasks:
        if row["artifact"]:
            ours, theirs = (row[rule]["bubble_time"] for rule in Rule)
            parts = (f"{ours[part]:6.1%} / {theirs[part]:6.1%}" for part in ours)
            print(f"{row['task']:10} {'  '.join(parts)}")


def _print_mix(tasks: list[dict[str, Any]]) -> None:
    row = next(row for row in tasks if row["artifact"] and row["task"] == "mix")
    print("\nWork of the mixed workload per iteration of 3.6B: our rule, FreeRide's, artifact")
    for stage, name in enumerate(row["runs"]):
        print(f"  stage {stage} {name:10}" + "".join(f" {row[by]['work_per_iteration'][stage]:8.1f}" for by in _BY))


def _between(low: float, high: float, kind: type[float] | type[int] = float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = nan
        if not low <= value <= high:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} was given; expected {what} from {low} to {high}")
        return value

    return read


def add_options(parser: argparse.ArgumentParser) -> None:
    share = _between(0, 0.2)
    parser.add_argument("--noise", type=share, default=0.01, help="of the passes: deviation over mean (default: 0.01)")
    parser.add_argument("--step-noise", type=share, default=0.02, help="of the steps (default: 0.02)")
    parser.add_argument(
        "--wake-us",
        type=_between(0, 10**6, int),
        default=130,
        help="from a gate's opening to the first step, by our rule (default: 130)",
    )
    parser.add_argument(
        "--iterations", type=_between(1, 10**4, int), default=150, help="of each training that count (default: 150)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    parser.add_argument("--png", metavar="DIR", type=Path, help="draw pictures into this folder")
    add_options(parser)
    options = parser.parse_args()
    for flag, folder in (("--json", options.json and options.json.parent), ("--png", options.png)):
        if folder and not folder.is_dir():
            parser.error(f"argument {flag}: {folder}: no such folder; expected one that is there")
    found = {"command": " ".join(["python scripts/benchmarks/sim_freeride.py", *sys.argv[1:]]), **study(options)}
    print_study(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if options.png:
        draw_study(options.png, found)


if __name__ == "__main__":
    main()
