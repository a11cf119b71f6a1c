"""PipeFill's scaling study in the simulator: a 40B model on 1K to 8K GPUs with the global batch fixed.

PipeFill (arXiv 2410.07192): 82 days on 1K GPUs, 34 on 4K, 26 on 8K; bubbles of 15 to 30%, more than 60% at scale;
filling them recovers up to 2.6K GPUs' worth of work on 8K GPUs, raises their utilisation by up to 63% (5 to 15% at low
scale), and slows the main job by less than 2%.

Assumed here, because the paper's set-up is not public in this detail:

* 16 pipeline stages, tensor parallelism 8, micro-batches of 2, a global batch of 1,024: 64, 32, 16 and 8 micro-batches;
* 1F1B; the 39.1B shape of Narayanan et al. 2021, with 48 layers; full recomputation, sequence parallelism, fp16;
* V100 with 32 GB in p3dn.24xlarge nodes (100 Gbit/s), at --efficiency of their peak while they compute; one row has
  V100s with 16 GB, and is the same otherwise;
* as many tokens as make 82 days on 1K GPUs;
* fill jobs of the catalog's ten kinds, as many of each, always some waiting, a resident and a tail job per GPU; they
  take what the catalog's roofline says: no cold caches, no context switches, no contention on the host;
* the main job is not slowed by them.

Fill work counts as GPUs' worth: what it would have taken on V100s with nothing else to do. --harvest is what the
runtime makes of a plan, a figure that scripts/benchmarks/sim_harvest.py measures on cores that do not preempt.

    python scripts/benchmarks/sim_paper.py --harvest 0.9
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.fill.pipeline.bubbles import ideal_bubble_share
from megatron.fill.wings.mainjob.hardware import GPUS, NETWORKS, GpuKind
from megatron.fill.wings.mainjob.model import MODELS
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute
from megatron.fill.wings.sim.cluster.simulate import simulate
from megatron.fill.wings.sim.filljobs.catalog import catalog_kinds
from megatron.fill.wings.sim.filljobs.whatif import jobs_without_end
from megatron.fill.wings.sim.mainjob import MainJob
from megatron.fill.wings.sim.results import UseOfTime, summarise
from megatron.fill.wings.sim.sweep import run_all
from megatron.fill.wings.sim.values import FillKind, MainJobRun, RuntimeModel, Scenario

STAGES, TENSOR, MICROBATCH, GLOBAL_BATCH = 16, 8, 2, 1024
SCALES = {1024: 8, 2048: 16, 4096: 32, 8192: 64}  # GPUs: data-parallel ranks
PAPER_DAYS = {1024: 82, 4096: 34, 8192: 26}
PAPER_WORTH_8K, PAPER_GAIN_8K = 2600, 0.63
GPU, SMALL_GPU, NETWORK = GPUS["v100-32gb"], GPUS["v100-16gb"], NETWORKS["p3dn.24xlarge"]
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Scale:
    """One row of the study.

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
    """Of the time between the first forward and the last backward of an iteration, without reduction and optimizer."""
    timeline, costs = job.timeline(), job.costs()
    waits = sum(wait.duration_ns for row in timeline.waits for wait in row)
    other = sum(costs.reduce_ns) + sum(costs.optimizer_ns)
    return waits / (job.parallel.pp * timeline.period_ns - other)


def filled(job: MainJob, kinds: Sequence[FillKind], runtime: RuntimeModel, duration_s: float = DAY_S) -> UseOfTime:
    """Where the devices' time goes with jobs that never run out."""
    groups = job.groups()
    devices = sum(group.count for group in groups)
    jobs = jobs_without_end(kinds, devices, duration_s)
    scenario = Scenario((MainJobRun(job.name, groups),), tuple(kinds), jobs, duration_s, "fifo", runtime)
    return summarise(scenario, simulate(scenario)).total


def one_scale(scale: Scale) -> dict[str, Any]:
    """Its figures."""
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
        "microbatches": job.microbatches,
        "iteration_s": job.iteration_s,
        "bubble_share": pipeline_bubble_share(job),
        "bubble_share_of_iteration": job.bubble_share,
        "ideal_bubble_share": ideal_bubble_share(STAGES, job.microbatches),
        "main_utilisation": use.main,
        "fill_utilisation": use.fill,
        "gain": use.gain,
        "free_gib": [min(one.free_bytes for one in group.cycle.slots) / 2**30 for group in job.groups()],
        **{f"gpus_worth_{name}": found.gpus_worth for name, found in uses.items()},
    }


def study(efficiency: float, harvest: float) -> list[dict[str, Any]]:
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


def print_study(rows: Sequence[dict[str, Any]]) -> None:
    print("                       days      bubbles             free         GPUs' worth of fill work    gain")
    print(" GPUs        each paper  ours  ours ideal   main      GiB   plan +tail measured paper   ours paper")
    for row in rows:
        free = f"{min(row['free_gib']):.1f}-{max(row['free_gib']):.1f}"
        gain = row["paper_gain"]
        print(
            f"{row['gpus']:5} {row['gpu']:>11} {row['paper_days'] or '':5} {row['days']:5.1f}"
            f" {row['bubble_share']:5.1%} {row['ideal_bubble_share']:5.1%} {row['main_utilisation']:6.1%} {free:>9}"
            f" {row['gpus_worth_planned_resident']:5.0f} {row['gpus_worth_planned']:5.0f}"
            f" {row['gpus_worth_filled']:8.0f}"
            f" {row['paper_gpus_worth'] or '':5} {row['gain']:+6.0%} {'' if gain is None else f'{gain:+.0%}':>5}"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--efficiency", type=float, default=0.45, help="share of the GPU's peak (default: 0.45)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harvest", type=float, default=1.0, help="share of a plan's work that is done (default: 1)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    add_options(parser)
    options = parser.parse_args()
    rows = study(options.efficiency, options.harvest)
    print_study(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
