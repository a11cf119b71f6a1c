"""The simulator: does it agree with real runs, what does it say of the papers' studies, and how fast is it?

    truth        six real trainings against what the simulator says of them (sim_truth.py)
    harvest      what the runtime makes of a plan in bubbles of seconds, in a real training (sim_harvest.py)
    zero_bubble  published bubble rates of 1F1B and ZB-H1 (sim_zero_bubble.py)
    paper        PipeFill's scaling study, 1K to 8K GPUs, with the harvest as measured (sim_paper.py)
    freeride     FreeRide's study (sim_freeride.py)
    speed        8,192 devices, one week, up to 500,000 fill jobs (sim_speed.py)

    python scripts/benchmarks/bench_sim.py --json docs/benchmarks/sim.json

Each part can be left out or taken from files that its own script wrote. The other studies of PipeFill's paper are
sim_pipefill.py's, in a file of their own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.benchmarks import sim_freeride, sim_harvest, sim_paper, sim_speed, sim_truth, sim_zero_bubble

PARTS = ("truth", "harvest", "zero_bubble", "paper", "freeride", "speed")


def bench(options: argparse.Namespace) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    if "truth" in options.parts:
        parts["truth"] = _truth(options)
    if "harvest" in options.parts:
        parts["harvest"] = _harvest(options)
    if "zero_bubble" in options.parts:
        parts["zero_bubble"] = sim_zero_bubble.study()
        sim_zero_bubble.print_study(parts["zero_bubble"])
    if "paper" in options.parts:
        harvest = parts.get("harvest", {"harvest": options.harvest})["harvest"]
        parts["paper"] = {"harvest": harvest, "rows": sim_paper.study(options.efficiency, harvest)}
        sim_paper.print_study(parts["paper"]["rows"])
    if "freeride" in options.parts:
        parts["freeride"] = sim_freeride.study(options)
        sim_freeride.print_study(parts["freeride"])
    if "speed" in options.parts:
        parts["speed"] = options.speed_from or sim_speed.study(options.policy, options.load)
        sim_speed.print_study(parts["speed"])
    return {"summary": _summary(parts), **parts}


def _figures(path: str) -> Any:
    """What another script wrote, read before the first part runs: a wrong name is not to cost minutes."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{path}: not JSON: {error}") from None


def _truth(options: argparse.Namespace) -> Any:
    if options.truth_from:
        return options.truth_from
    with tempfile.TemporaryDirectory() as scratch:
        return sim_truth.study(Path(scratch), options.truth_iterations, 1)


def _harvest(options: argparse.Namespace) -> dict[str, Any]:
    """All its trainings; what counts is the least that one made on a device that does not preempt."""
    runs = options.harvest_from
    if not runs:
        with tempfile.TemporaryDirectory() as scratch:
            runs = [sim_harvest.study(Path(scratch), 24, 10)]
    found = [run["harvest"] for run in runs if not run["preempting"]]
    if not found:
        raise SystemExit("--harvest-from: all of these trainings had --preempting; expected at least one without")
    return {"harvest": min(1.0, *found), "runs": runs}


def _summary(parts: dict[str, Any]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    if "truth" in parts:
        ways = parts["truth"]["summary"]
        for way, values in ways.items():
            summary |= {f"truth_{way}_{name}": value for name, value in values.items()}
    if "harvest" in parts:
        summary["harvest"] = parts["harvest"]["harvest"]
    if "paper" in parts:
        row = next(row for row in parts["paper"]["rows"] if row["gpus"] == 8192)
        summary |= {"days_8k": row["days"], "bubble_share_of_pipeline_8k": row["bubble_share"]}
        summary |= {"bubble_share_of_iteration_8k": row["bubble_share_of_iteration"], "gain_8k": row["gain"]}
        summary["gpus_worth_8k"] = row["gpus_worth_filled"]
    if "speed" in parts:
        row = next(row for row in parts["speed"] if row["jobs"] == 50_000)
        summary |= {"week_8192_s": row["wall_s"], "week_8192_peak_bytes": row["peak_bytes"]}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="only these (default: all)")
    parser.add_argument("--truth-from", metavar="FILE", type=_figures, help="what sim_truth.py --json wrote")
    parser.add_argument("--truth-iterations", type=int, default=360, help="of each of its trainings (default: 360)")
    parser.add_argument(
        "--harvest-from", metavar="FILE", type=_figures, nargs="+", help="what sim_harvest.py --json wrote"
    )
    parser.add_argument("--speed-from", metavar="FILE", type=_figures, help="what sim_speed.py --json wrote")
    parser.add_argument("--harvest", type=float, default=1.0, help="without the part harvest (default: 1)")
    for script in (sim_paper, sim_freeride, sim_speed):
        script.add_options(parser)
    options = parser.parse_args()
    result = {"command": "python scripts/benchmarks/bench_sim.py " + " ".join(sys.argv[1:]), **bench(options)}
    print(json.dumps(result["summary"], indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
