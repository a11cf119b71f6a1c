"""The studies of PipeFill's paper beside its scaling study, in the simulator.

    share        slowdown and throughput by the share of each bubble that is filled, without preemption
    kinds        each kind of fill job in bubbles against alone
    policies     completion times and makespan by policy and load
    schedules    GPipe, 1F1B and interleaved 1F1B: bubbles, free memory, fill work
    sensitivity  fill work by the length of bubbles and the memory that is free in them
    trace        policies with sizes and arrivals shaped like published traces, or --trace FILE
    physical     5 billion parameters on 128 GPUs, the size of the paper's cluster
    loss         the 8K study where steps are slower in bubbles than alone

    python scripts/benchmarks/sim_pipefill.py --json docs/benchmarks/pipefill-studies.json --png docs/images

The 40B main job and what is assumed of it are those of sim_paper.py; kinds, schedules, sensitivity and loss have it.
The others have the 5B main job of studies/bubbles.py. One fill job per GPU, unless a figure says that it has a
tail job too. Of the paper (arXiv 2410.07192) only its abstract's figures are compared: 2.6K GPUs' worth on 8K GPUs, up
to 63% more utilisation there and 5 to 15% at low scale, less than 2% slowdown.

--harvest is what the runtime makes of a plan: the one place where a measured figure enters. All parts but share take
it; share plays by itself what it stands for (bubbles that end early, predictions, waking up).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.errors import ConfigError
from megatron.fill.wings.sim.filljobs.catalog import catalog_kinds
from megatron.fill.wings.sim.filljobs.trace import load_trace
from megatron.fill.wings.sim.values import RuntimeModel
from scripts.benchmarks import sim_paper
from scripts.benchmarks.studies import bubbles, pictures, queues, share, tables

PARTS = ("share", "kinds", "policies", "schedules", "sensitivity", "trace", "physical", "loss")
CLAIMED_SLOWDOWN = 0.02  # PipeFill's abstract: less than this


def study(parts: list[str], efficiency: float, runtime: RuntimeModel, trace: Path | None) -> dict[str, Any]:
    """The figures of each part."""
    works = {
        "share": lambda: share.filled_shares(runtime),
        "kinds": lambda: bubbles.kinds_alone_and_in_bubbles(efficiency, runtime),
        "policies": lambda: queues.policies(runtime),
        "schedules": lambda: bubbles.schedules(efficiency, runtime),
        "sensitivity": lambda: bubbles.sensitivity(efficiency, runtime),
        "trace": lambda: queues.traces(runtime, trace),
        "physical": lambda: bubbles.physical(runtime),
        "loss": lambda: bubbles.loss(efficiency, runtime),
    }
    found = {}
    for part in PARTS:
        if part in parts:
            found[part] = works[part]()
            print(*tables.TABLES[part](found[part]), sep="\n", end="\n\n", flush=True)
    return found


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """The figures that the documentation names."""
    flat: dict[str, Any] = {}
    for noise in share.NOISES if "share" in found else ():
        flat[f"share_below_2_percent_noise_{noise:g}"] = share.share_below(found["share"], noise, CLAIMED_SLOWDOWN)
    for row in found.get("share", ()):
        if row["share"] in (1.0, None):
            name = f"{'full' if row['share'] else 'predicted'}_noise_{row['noise']:g}"
            flat |= {f"share_{key}_{name}": row[key] for key in ("slowdown", "main_tflops", "fill_tflops")}
    for row in found.get("kinds", ()):
        flat[f"kinds_{row['gpus']}_{row['gpu']}_{row['kind']}"] = row["relative"]
    for row in found.get("policies", ()):
        flat[f"policies_{row['load']:g}_{row['policy']}_mean_s"] = row["mean_s"]
        flat[f"policies_{row['load']:g}_{row['policy']}_makespan_s"] = row["makespan_s"]
    for row in found.get("schedules", ()):
        flat[f"schedules_{row['gpus']}_{row['schedule']}_gain"] = row["gain"]
    for row in found.get("sensitivity", ()):
        flat[f"sensitivity_{row['length']:g}x_{row['free_gib']}_gib_per_bubble_second"] = row["per_bubble_second"]
    for row in found.get("trace", ()):
        flat[f"trace_{row['arrivals']}_{row['policy']}_mean_s"] = row["mean_s"]
        flat[f"trace_{row['arrivals']}_{row['policy']}_makespan_s"] = row["makespan_s"]
    for row in found.get("physical", ()):
        flat[f"physical_{row['microbatches']}_{row['schedule']}_gain"] = row.get("gain")
    if "loss" in found:
        flat |= {f"loss_meets_paper_at_{name}": value for name, value in found["loss"]["meets_paper_at"].items()}
        for row in found["loss"]["rows"]:
            flat[f"loss_{row['step_efficiency']:g}_gpus_worth"] = row["gpus_worth"]
    return flat


def share_option(text: str) -> float:
    """A share above 0 and up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0 and up to 1")
    return value


def trace_option(text: str) -> Path:
    """A trace that can be read: a wrong line is not to cost minutes."""
    try:
        load_trace(text, catalog_kinds(sim_paper.SMALL_GPU))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def output_option(text: str) -> Path:
    """A file in a folder that is there."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a file in a folder that is there")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="only these (default: all)")
    parser.add_argument("--json", metavar="FILE", type=output_option, help="write the figures here")
    parser.add_argument("--png", metavar="DIR", type=Path, help="draw a picture of each part into this folder")
    parser.add_argument(
        "--harvest", type=share_option, default=1.0, help="share of a plan's work that is done (default: 1)"
    )
    parser.add_argument(
        "--step-efficiency",
        type=share_option,
        default=1.0,
        help="speed of a step in a bubble over its speed alone, in all parts but loss (default: 1)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=trace_option,
        help="a CSV file of fill jobs (docs/simulator.md) to play in trace",
    )
    parser.add_argument("--efficiency", type=share_option, default=0.45, help="of the 40B main job (default: 0.45)")
    options = parser.parse_args()
    if options.png and not options.png.is_dir():
        parser.error(f"argument --png: {str(options.png)!r}: expected a folder that is there")
    runtime = RuntimeModel(harvest=options.harvest, step_efficiency=options.step_efficiency)
    found = study(options.parts, options.efficiency, runtime, options.trace)
    if options.json:
        head = {
            "command": "python scripts/benchmarks/sim_pipefill.py " + " ".join(sys.argv[1:]),
            "harvest": options.harvest,
            "step_efficiency": options.step_efficiency,
            "efficiency": options.efficiency,
            "summary": summary(found),
        }
        options.json.write_text(json.dumps(head | found, indent=2) + "\n", encoding="utf-8")
    if options.png:
        for part, figures in found.items():
            pictures.draw(part, figures, options.png / f"pipefill-{part}.png")


if __name__ == "__main__":
    main()
