"""The simulator against published figures, and how fast it is.

* ``zero_bubble``: bubble rates of 1F1B and ZB-H1 in twelve configurations of Qi et al. 2023 (arXiv 2401.10241).  Their
  Table 9 has the times of F, B, W and a transfer on 8 to 32 A100s, their Table 5 the bubble rates.  Times go in here,
  rates come out: the rate is what is left of the longest rank's time from its first to its last pass without its passes
  (their section 5.3), so optimizer and reduction do not count.
* ``events``: bubbles of ``--cases`` random schedules (placements, splits and times too) by the timeline and by a
  discrete-event simulation that shares no code with it; the number that differ.
* ``paper``: PipeFill's scaling study (arXiv 2410.07192), a 40B model on 1K to 8K GPUs with the global batch fixed: 82
  days on 1K GPUs, 34 on 4K, 26 on 8K, and up to 2.6K GPUs' worth of fill work and a gain of 63% on 8K.
* ``speed``: 8,192 devices, a week, up to 500,000 fill jobs, each simulation in a process of its own on one core,
  planning included.  The jobs are of the catalog's ten kinds, generated so that they are ``--load`` of what the bubbles
  can do.

The study assumes, because the paper's set-up is not public in this detail:

* 16 pipeline stages, tensor parallelism 8, micro-batches of 2, a global batch of 1,024: 64, 32, 16 and 8 micro-batches;
* 1F1B; the 39.1B shape of Narayanan et al. 2021, with 48 layers; full recomputation, sequence parallelism, fp16;
* V100 with 32 GB in p3dn.24xlarge nodes (100 Gbit/s), at ``--efficiency`` of their peak while they compute; one row has
  V100s with 16 GB, and is the same otherwise;
* as many tokens as make 82 days on 1K GPUs;
* fill jobs of the catalog's ten kinds, as many of each, always some waiting, a resident and a tail job per GPU; they
  take what the catalog's roofline says: no cold caches, no context switches, no contention on the host;
* the main job is not slowed by them.

Fill work counts as GPUs' worth: what it would have taken on V100s with nothing else to do.  ``--harvest`` is what the
runtime makes of a plan; 0.749 was measured in a training (docs/benchmarks/harvest.json).

    python scripts/benchmarks/bench_sim.py --harvest 0.749 --json sim.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

from megatron.fill.pipeline.costs import PipelineCosts
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.pipeline.timeline import simulate as simulate_pipeline
from megatron.fill.wings.mainjob.hardware import GPUS, NETWORKS, GpuKind
from megatron.fill.wings.mainjob.model import MODELS
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute
from megatron.fill.wings.sim.cluster.simulate import simulate
from megatron.fill.wings.sim.filljobs.catalog import catalog_kinds
from megatron.fill.wings.sim.filljobs.generate import Generator, fill_capacity, generate
from megatron.fill.wings.sim.filljobs.whatif import jobs_without_end
from megatron.fill.wings.sim.mainjob import MainJob
from megatron.fill.wings.sim.results import UseOfTime, summarise
from megatron.fill.wings.sim.sweep import run_all
from megatron.fill.wings.sim.values import FillKind, MainJobRun, RuntimeModel, Scenario
from scripts.benchmarks.harness import arguments, check_above_zero, opened
from tests.support.schedule_events import differs

# model, stages, micro-batches; F, B, W and transfer in ms; bubble rate of 1F1B and of ZB-H1
PUBLISHED = (
    ("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    ("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    ("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    ("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    ("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    ("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
    ("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397),
    ("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088),
    ("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576),
    ("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421),
    ("28.3B", 32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106),
    ("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594),
)
STAGES, TENSOR, MICROBATCH, GLOBAL_BATCH = 16, 8, 2, 1024
SCALES = {1024: 8, 2048: 16, 4096: 32, 8192: 64}  # GPUs: data-parallel ranks
PAPER_DAYS = {1024: 82, 4096: 34, 8192: 26}
PAPER_WORTH_8K, PAPER_GAIN_8K = 2600, 0.63
GPU, SMALL_GPU, NETWORK = GPUS["v100-32gb"], GPUS["v100-16gb"], NETWORKS["p3dn.24xlarge"]
DAY_S = 86400.0
WEEK_S = 7 * DAY_S
SIGMA = 1.5  # of the log-normal sizes


def zero_bubble() -> list[dict[str, Any]]:
    """A row per published configuration."""
    rows = []
    for model, stages, microbatches, forward, backward, weight, p2p, *published in PUBLISHED:
        forward_ns, backward_ns, weight_ns = (round(ms * 1e6) for ms in (forward, backward + weight, weight))
        costs = PipelineCosts.uniform(stages, forward_ns, backward_ns, weight_ns, p2p_ns=round(p2p * 1e6))
        row: dict[str, Any] = {"model": model, "stages": stages, "microbatches": microbatches}
        for name, rate in zip(("1f1b", "zb-h1"), published, strict=True):
            timeline = simulate_pipeline(make_schedule(name, stages, microbatches), costs)
            longest_ns = max(spans[-1].end_ns - spans[0].start_ns for spans in timeline.spans)
            row[name] = 1 - microbatches * (forward_ns + backward_ns) / longest_ns
            row[f"{name}_published"] = rate
        rows.append(row)
    return rows


@dataclass(frozen=True, slots=True)
class Scale:
    """One row of the paper's study.

    Attributes:
        harvest: the share of a plan's work that is really done.
    """

    gpus: int
    gpu: GpuKind
    efficiency: float
    harvest: float


def main_job(dp: int, efficiency: float, gpu: GpuKind = GPU) -> MainJob:
    parallel = Parallel(
        tp=TENSOR,
        pp=STAGES,
        dp=dp,
        microbatch=MICROBATCH,
        global_batch=GLOBAL_BATCH,
        recompute=Recompute.FULL,
        sequence_parallel=True,
        precision=Precision.FP16,
    )
    return MainJob("gpt-40b", MODELS["gpt-40b"], gpu, NETWORK, parallel, efficiency)


def pipeline_bubble_share(job: MainJob) -> float:
    """Share of the time between the first forward and the last backward, without reduction and optimizer."""
    timeline, costs = job.timeline(), job.costs()
    waits = sum(wait.duration_ns for row in timeline.waits for wait in row)
    other = sum(costs.reduce_ns) + sum(costs.optimizer_ns)
    return waits / (job.parallel.pp * timeline.period_ns - other)


def filled(job: MainJob, kinds: Sequence[FillKind], runtime: RuntimeModel) -> UseOfTime:
    """The devices' time in a day with jobs that never run out."""
    groups = job.groups()
    devices = sum(group.count for group in groups)
    jobs = jobs_without_end(kinds, devices, DAY_S)
    scenario = Scenario((MainJobRun(job.name, groups),), tuple(kinds), jobs, DAY_S, "fifo", runtime)
    return summarise(scenario, simulate(scenario)).total


def one_scale(scale: Scale) -> dict[str, Any]:
    job = main_job(SCALES[scale.gpus], scale.efficiency, scale.gpu)
    kinds = catalog_kinds(scale.gpu)
    runtimes = {
        "planned_resident": RuntimeModel(tail=False),
        "planned": RuntimeModel(),
        "resident": RuntimeModel(harvest=scale.harvest, tail=False),
        "filled": RuntimeModel(harvest=scale.harvest),
    }
    uses = {name: filled(job, kinds, runtime) for name, runtime in runtimes.items()}
    use = uses["filled"]
    return {
        "gpus": scale.gpus,
        "gpu": scale.gpu.name,
        "microbatches": job.parallel.microbatches,
        "iteration_s": job.iteration_s,
        "bubble_share": pipeline_bubble_share(job),
        "bubble_share_of_iteration": job.bubble_share,
        "ideal_bubble_share": (STAGES - 1) / (job.parallel.microbatches + STAGES - 1),
        "main_utilisation": use.main,
        "fill_utilisation": use.fill,
        "gain": use.gain,
        "free_gib": [min(one.free_bytes for one in group.cycle.slots) / 2**30 for group in job.groups()],
        **{f"gpus_worth_{name}": found.gpus_worth for name, found in uses.items()},
    }


def paper(efficiency: float, harvest: float) -> list[dict[str, Any]]:
    """A row per scale, and one more for the largest with the smaller GPU."""
    scales = [Scale(gpus, GPU, efficiency, harvest) for gpus in SCALES]
    scales.append(Scale(max(SCALES), SMALL_GPU, efficiency, harvest))
    rows: list[dict[str, Any]] = run_all(one_scale, scales)
    for row in rows:
        largest = row["gpus"] == max(SCALES)
        row["days"] = PAPER_DAYS[1024] * row["iteration_s"] / rows[0]["iteration_s"]
        row["paper_days"] = PAPER_DAYS.get(row["gpus"])
        row["paper_gpus_worth"] = PAPER_WORTH_8K if largest else None
        row["paper_gain"] = PAPER_GAIN_8K if largest else None
    return rows


def timed(jobs: int, policy: str, load: float) -> dict[str, Any]:
    """Simulate a week in this process, on one core."""
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


def speed(sizes: Sequence[int], policy: str, load: float) -> list[dict[str, Any]]:
    """A row for each number of jobs, one process after the other."""
    rows = []
    for jobs in sizes:
        one = [sys.executable, __file__, "--one", str(jobs), "--policy", policy, "--load", str(load)]
        rows.append(json.loads(subprocess.run(one, stdout=subprocess.PIPE, text=True, check=True).stdout))
    return rows


def print_rows(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print the rows' columns as a table."""
    cells = [
        [f"{value:.4g}" if isinstance(value := row[name], float) else str(value) for name in columns] for row in rows
    ]
    widths = [max(len(line[index]) for line in [columns, *cells]) for index in range(len(columns))]
    for line in [columns, *cells]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def main() -> None:
    parser = arguments(__doc__)
    parts = ("zero_bubble", "events", "paper", "speed")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="only these (default: all)")
    parser.add_argument("--cases", type=int, default=10_000, help="random schedules of events (default: 10000)")
    parser.add_argument("--efficiency", type=float, default=0.45, help="share of the GPU's peak (default: 0.45)")
    parser.add_argument("--harvest", type=float, default=1.0, help="share of a plan's work that is done (default: 1)")
    parser.add_argument("--jobs", type=int, nargs="+", default=[5_000, 50_000, 500_000], help="of speed's simulations")
    parser.add_argument("--policy", default="sjf", help="of the scheduler, for speed (default: sjf)")
    parser.add_argument("--load", type=float, default=0.9, help="share of what the bubbles can do (default: 0.9)")
    parser.add_argument("--one", type=int, metavar="JOBS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    check_above_zero(parser, options, "cases")
    if options.one:
        print(json.dumps(timed(options.one, options.policy, options.load)))
        return
    results = opened(parser, options.json)
    if "zero_bubble" in options.parts:
        rows = zero_bubble()
        errors = [abs(row[name] - row[f"{name}_published"]) for row in rows for name in ("1f1b", "zb-h1")]
        print_rows(rows, list(rows[0]))
        results.add("zero_bubble", {"largest_error_of_bubble_rates": max(errors)}, rows=rows)
    if "events" in options.parts:
        different = sum(map(differs, range(options.cases)))
        print(f"{options.cases} random schedules, {different} with other bubbles than the events'")
        results.add("events", {"random_schedules": options.cases, "random_schedules_differing": different})
    if "paper" in options.parts:
        rows = paper(options.efficiency, options.harvest)
        print_rows(rows, ["gpus", "gpu", "paper_days", "days", "bubble_share", "gpus_worth_filled", "gain"])
        row = next(row for row in rows if row["gpus"] == max(SCALES))
        figures = {"days_8k": row["days"], "bubble_share_of_pipeline_8k": row["bubble_share"]}
        figures |= {"bubble_share_of_iteration_8k": row["bubble_share_of_iteration"], "gain_8k": row["gain"]}
        results.add("paper", figures | {"gpus_worth_8k": row["gpus_worth_filled"]}, harvest=options.harvest, rows=rows)
    if "speed" in options.parts:
        rows = speed(options.jobs, options.policy, options.load)
        print_rows(rows, ["jobs", "wall_s", "simulate_s", "events_per_s", "peak_bytes"])
        figures = {f"week_8192_{row['jobs']}_jobs_s": row["wall_s"] for row in rows}
        results.add("speed", figures | {"week_8192_peak_bytes": max(row["peak_bytes"] for row in rows)}, rows=rows)


if __name__ == "__main__":
    main()
