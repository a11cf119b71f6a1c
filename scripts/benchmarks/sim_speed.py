"""How fast the simulator is: 8,192 devices, a week, and 5,000, 50,000 and 500,000 fill jobs, each on one core.

The main job is that of sim_paper.py with 64 data-parallel ranks; the jobs are of the catalog's ten kinds, generated
(log-normal sizes, sigma 1.5) so that they are --load of what the bubbles can do. Each simulation runs in a process of
its own, planning included.

    python scripts/benchmarks/sim_speed.py
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from math import exp
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.wings.sim.cluster.simulate import simulate
from megatron.fill.wings.sim.filljobs.catalog import catalog_kinds
from megatron.fill.wings.sim.filljobs.generate import Generator, fill_capacity, generate
from megatron.fill.wings.sim.results import summarise
from megatron.fill.wings.sim.values import MainJobRun, Scenario
from scripts.benchmarks.sim_paper import GPU, main_job

WEEK_S = 7 * 86400.0
SIGMA = 1.5
JOBS = (5_000, 50_000, 500_000)


def one(jobs: int, policy: str, load: float) -> dict[str, Any]:
    """Simulate in this process."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    began_s = time.perf_counter()
    groups = main_job(64, 0.45).groups()
    kinds = catalog_kinds(GPU)
    mean_s = load * fill_capacity(groups, kinds) * WEEK_S / jobs
    made = generate(Generator(jobs=jobs, median_s=mean_s / exp(SIGMA**2 / 2), sigma=SIGMA), kinds, WEEK_S)
    made_s = time.perf_counter()
    scenario = Scenario((MainJobRun("main", groups),), kinds, made, WEEK_S, policy)
    outcome = simulate(scenario)
    ended_s = time.perf_counter()
    result = summarise(scenario, outcome)
    return {
        "devices": result.total.devices,
        "jobs": jobs,
        "policy": policy,
        "prepare_s": made_s - began_s,
        "simulate_s": ended_s - made_s,
        "wall_s": ended_s - began_s,
        "events": outcome.events,
        "events_per_s": outcome.events / (ended_s - made_s),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "succeeded": result.jobs["SUCCEEDED"],
        "gpus_worth": result.total.gpus_worth,
    }


def study(policy: str, load: float) -> list[dict[str, Any]]:
    """A row for each number of jobs, one process after the other."""
    rows = []
    for jobs in JOBS:
        arguments = [sys.executable, __file__, "--one", str(jobs), "--policy", policy, "--load", str(load)]
        done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout))
    return rows


def print_study(rows: list[dict[str, Any]]) -> None:
    print("   jobs  seconds  of which simulating  events/s  peak MiB  us per job")
    for row in rows:
        print(
            f"{row['jobs']:7,} {row['wall_s']:8.1f} {row['simulate_s']:20.1f} {row['events_per_s']:9,.0f}"
            f" {row['peak_bytes'] / 2**20:9.0f} {row['simulate_s'] / row['jobs'] * 1e6:11.0f}"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default="sjf", help="of the scheduler (default: sjf)")
    parser.add_argument("--load", type=float, default=0.9, help="of what the bubbles can do (default: 0.9)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    parser.add_argument("--one", type=int, metavar="JOBS", help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.policy, options.load)))
        return
    rows = study(options.policy, options.load)
    print_study(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
