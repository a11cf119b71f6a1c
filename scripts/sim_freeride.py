"""FreeRide's study in the simulator: time increase and cost savings of its side tasks, beside its artifact's figures.

GPT-like models of 1.2, 3.6 and 6 billion parameters in four 1F1B stages on four RTX 6000 Ada, with 4, 6 and 8
micro-batches. From FreeRide's artifact (github.com/jiashu-z/freeride): the models and their micro-batches, the time of
an iteration, what each stage leaves of its memory, each side task's step time, memory and throughput on an RTX 3080,
the prices, and the results to compare with (its evaluation guide's expected output). The bubbles are the simulator's;
they are filled by PipeFill's own predictor and step loop in virtual time.

Its formulas (ae/collect_experiment_data/analyze_cost.ipynb), with T the training's time, W the side work, Th its
throughput on the cheaper GPU, and P the prices:

    time increase I = (T_with - T_without) / T_without
    saving        S = (sum W / Th * P_3080 - (T_with - T_without) * P_ada) / (T_without * P_ada)

For single tasks the artifact prints the saving without subtracting the overhead; both are shown.

Assumed, because the artifact does not say it: how much passes and steps vary (--noise, --step-noise), and for 6B the
efficiency of 3.6B.

    python scripts/sim_freeride.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron.fill.pipeline.timeline import Compiled
from megatron.fill.sim.filljobs.freeride import SIDE_TASKS
from megatron.fill.sim.mainjob.hardware import GPUS, NETWORKS
from megatron.fill.sim.mainjob.job import MainJob
from megatron.fill.sim.mainjob.model import MODELS
from megatron.fill.sim.mainjob.parallel import Parallel, Precision, Recompute
from megatron.fill.sim.truth.replay import FillRule, PlayedIteration, open_bubbles, replay
from megatron.fill.sim.truth.steps import StepTimes
from megatron.fill.sim.values import FillKind
from megatron.fill.types import CycleKey

STAGES = 4
PRICE_ADA_H, PRICE_3080_H = 3.96, 0.18  # of the server with four GPUs, and of the one with one
ITERATION_S = {4: 4.122, 5: 4.714, 6: 5.359, 7: 6.051, 8: 6.609}  # of 3.6B, by micro-batches (train_simplegpt2.py)
ITERATION_1_2B_S = 6.56  # with four micro-batches, beside ResNet18 (expected output: 833.28 s for 127 iterations)
GB = 10**9


@dataclass(frozen=True, slots=True)
class Task:
    """A side task as the artifact measured it.

    Attributes:
        throughput_3080: work per second on an RTX 3080.
        increase, saving: its results beside 3.6B with four micro-batches, in percent.
    """

    kind: FillKind
    throughput_3080: float
    increase: float
    saving: float


@dataclass(frozen=True, slots=True)
class Size:
    """A model, its micro-batch, and the memory that each stage leaves to side tasks, in GB."""

    model: str
    microbatch: int
    free_gb: tuple[int, ...]


TASKS = {
    name: Task(SIDE_TASKS[f"freeride-{kind}"], *figures)
    for name, kind, figures in (
        ("ResNet18", "resnet18", (998.7, 0.03, 8.07)),
        ("ResNet50", "resnet50", (393.4, 1.36, 5.92)),
        ("VGG19", "vgg19", (161.8, 2.1, 5.34)),
        ("Graph SGD", "graph-sgd", (1.5, 1.16, 19.87)),
        ("PageRank", "pagerank", (126.3, 0.05, 3.06)),
        ("Image", "image", (7.8, 0.74, 4.85)),
    )
}
MIX = ("PageRank", "ResNet18", "Image", "VGG19")  # by stage
MIX_INCREASE, MIX_SAVING = 1.57, 6.15
SIZES = {
    "1.2B": Size("freeride-1.2b", 12, (5, 12, 21, 32)),
    "3.6B": Size("freeride-3.6b", 3, (3, 9, 16, 24)),
    "6B": Size("freeride-6b", 1, (1, 6, 10, 14)),
}


@dataclass(frozen=True, slots=True)
class Filled:
    """What side tasks did beside one training, per second of the training alone."""

    increase: float
    value_3080: float
    value_ada: float

    @property
    def saving(self) -> float:
        return self.value_3080 - self.increase

    @property
    def saving_same_gpu(self) -> float:
        """With the side work priced on the GPU that it ran on."""
        return self.value_ada - self.increase


def main_job(size: Size, microbatches: int, efficiency: float) -> MainJob:
    parallel = Parallel(
        pp=STAGES,
        microbatch=size.microbatch,
        global_batch=size.microbatch * microbatches,
        precision=Precision.FP32,
        recompute=Recompute.SELECTIVE,  # its attention keeps no scores: else no stage would fit
    )
    gpu, network = GPUS["rtx-6000-ada"], NETWORKS["pcie4"]
    return MainJob("main", MODELS[size.model], gpu, network, parallel, efficiency, memory_reserve_bytes=0)


def fitted_efficiency(size: Size, iteration_s: float) -> float:
    """Of the GPU's peak, so that an iteration with four micro-batches takes this long."""
    low, high = 1e-3, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if main_job(size, 4, middle).iteration_s > iteration_s else (low, middle)
    return high


def played(job: MainJob, iterations: int, noise: float, seed: int) -> list[list[PlayedIteration]]:
    """Per stage, iterations whose passes vary by ``noise`` (standard deviation over mean)."""
    random = np.random.default_rng(seed)
    compiled, costs = Compiled(job.schedule, job.rendezvous), job.costs()
    mean = compiled.durations(costs)
    rows: list[list[PlayedIteration]] = [[] for _ in mean]
    start_ns = 0
    for number in range(iterations):
        durations = [[round(ns * random.normal(1.0, noise)) for ns in row] for row in mean]
        timeline = compiled.run(costs, durations, empty=True)
        for row, waits in zip(rows, timeline.waits, strict=True):
            row.append(PlayedIteration(number + 1, start_ns, waits))
        start_ns += timeline.period_ns
    return rows


def fill(job: MainJob, size: Size, by_stage: Sequence[str | None], options: argparse.Namespace) -> Filled:
    """Run a side task in the bubbles of each stage that has room for it."""
    random = np.random.default_rng(1)
    rule = FillRule(margin=0.5)  # as on a GPU
    key = CycleKey(job.schedule.name, job.schedule.microbatches)
    late_ns, value_3080, value_ada = [0.0], 0.0, 0.0
    rows = played(job, options.iterations, options.noise, seed=0)
    whole_s = rows[0][-1].start_ns / 1e9 + job.iteration_s
    for stage, (name, row) in enumerate(zip(by_stage, rows, strict=True)):
        task = TASKS[name] if name else None
        if task is None:
            continue
        (profile,) = task.kind.profiles
        if profile.memory_bytes > size.free_gb[stage] * GB:
            continue
        steps = random.lognormal(0.0, options.step_noise, 997) * profile.duration_ns
        times = StepTimes(tuple(int(ns) for ns in steps), (options.wake_us * 1000,), work=profile.work)
        done = replay(open_bubbles(row, key, rule), times, preempted=False)
        late_ns.append(sum(use.overrun_ns for use in done.uses))
        value_3080 += done.work_done / task.throughput_3080 * PRICE_3080_H
        value_ada += done.work_done / task.kind.alone_rate * PRICE_ADA_H / STAGES
    # Every overrun is taken to hold the whole pipeline up, on the stage with the most of it.
    return Filled(
        max(late_ns) / 1e9 / whole_s, value_3080 / (whole_s * PRICE_ADA_H), value_ada / (whole_s * PRICE_ADA_H)
    )


def study(options: argparse.Namespace) -> dict[str, Any]:
    """All tables."""
    efficiency = {
        "1.2B": fitted_efficiency(SIZES["1.2B"], ITERATION_1_2B_S),
        "3.6B": fitted_efficiency(SIZES["3.6B"], ITERATION_S[4]),
    }
    efficiency["6B"] = efficiency["3.6B"]
    iterations = [
        {
            "microbatches": m,
            "artifact_s": seconds,
            "simulated_s": main_job(SIZES["3.6B"], m, efficiency["3.6B"]).iteration_s,
        }
        for m, seconds in ITERATION_S.items()
    ]
    tasks = []
    for size_name, size in SIZES.items():
        for microbatches in (4, 6, 8):
            job = main_job(size, microbatches, efficiency[size_name])
            cases: dict[str, Sequence[str | None]] = {name: [name] * STAGES for name in TASKS} | {"mix": MIX}
            for name, by_stage in cases.items():
                found = fill(job, size, by_stage, options)
                compared = size_name == "3.6B" and microbatches == 4
                printed = (MIX_INCREASE, MIX_SAVING) if name == "mix" else (TASKS[name].increase, TASKS[name].saving)
                tasks.append(
                    {
                        "size": size_name,
                        "microbatches": microbatches,
                        "task": name,
                        "bubble_share": job.bubble_share,
                        "increase": found.increase,
                        "saving": found.saving,
                        "saving_without_overhead": found.value_3080,
                        "saving_same_gpu": found.saving_same_gpu,
                        "artifact_increase": printed[0] / 100 if compared else None,
                        "artifact_saving": printed[1] / 100 if compared else None,
                    }
                )
    return {"efficiency": efficiency, "iterations": iterations, "tasks": tasks}


def print_study(found: dict[str, Any]) -> None:
    print("Iteration of 3.6B, seconds: micro-batches, artifact, simulated")
    for row in found["iterations"]:
        error = row["simulated_s"] / row["artifact_s"] - 1
        print(f"  {row['microbatches']}  {row['artifact_s']:.3f}  {row['simulated_s']:.3f}  {error:+.1%}")
    print("size   m task       bubbles      I      S  S, I=0 S, same GPU  artifact I, S")
    for row in found["tasks"]:
        theirs = (
            "" if row["artifact_saving"] is None else f"{row['artifact_increase']:.2%} {row['artifact_saving']:.2%}"
        )
        print(
            f"{row['size']:5} {row['microbatches']:2} {row['task']:10} {row['bubble_share']:7.1%} "
            f"{row['increase']:6.2%} {row['saving']:6.2%} {row['saving_without_overhead']:7.2%} "
            f"{row['saving_same_gpu']:11.2%}  {theirs}"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--noise", type=float, default=0.01, help="of the passes: deviation over mean (default: 0.01)")
    parser.add_argument("--step-noise", type=float, default=0.02, help="of the steps (default: 0.02)")
    parser.add_argument(
        "--wake-us", type=int, default=130, help="from a gate's opening to the first step (default: 130)"
    )
    parser.add_argument("--iterations", type=int, default=150, help="of each training (default: 150)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    add_options(parser)
    options = parser.parse_args()
    found = study(options)
    print_study(found)
    means = [row for row in found["tasks"] if row["artifact_saving"] is not None]
    print(f"mean saving: {fmean(row['saving_without_overhead'] for row in means):.2%}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
