"""FreeRide's study: its side tasks in the bubbles of its trainings, their placement, and their savings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from megatron.fill.wings.mainjob.hardware import GPUS, NETWORKS
from megatron.fill.wings.mainjob.model import MODELS
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute
from megatron.fill.wings.sim.mainjob import MainJob
from scripts.benchmarks.studies.freeride.artifact import (
    BATCH,
    ITERATION_1_2B_S,
    ITERATION_S,
    MIX_INCREASE,
    MIX_ITERATIONS,
    MIX_SAVING,
    MIX_WORK,
    PRICE_3080_H,
    PRICE_ADA_H,
    SIZES,
    STAGES,
    TASKS,
    Size,
)
from scripts.benchmarks.studies.freeride.placement import fits, needed_gib, place, served
from scripts.benchmarks.studies.freeride.training import BubbleTime, Rule, SimulatedTraining, StageWork, Varying

MICROBATCHES = (4, 6, 8)
COMPARED = ("3.6B", 4)  # the only case with results in the artifact


def main_job(size: Size, microbatches: int, efficiency: float) -> MainJob:
    """Return a training of the artifact.

    Args:
        efficiency: achieved fraction of the GPU's peak.

    Raises:
        ValueError: a stage does not fit the GPU, or the efficiency is invalid.
    """
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
    """Fraction of the GPU's peak with which an iteration with four microbatches takes ``iteration_s``."""
    low, high = 1e-3, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if main_job(size, 4, middle).iteration_s > iteration_s else (low, middle)
    return high


class Studied:
    """A training and the effects of its side tasks.  A side task is given by its name and batch size."""

    def __init__(self, size: Size, training: SimulatedTraining) -> None:
        self.size = size
        self.training = training
        self._done = cache(self._fill)  # the mixed workload's tasks have run alone before

    def _fill(self, stage: int, name: str, batch: int, rule: Rule) -> StageWork:
        task = TASKS[name]
        return self.training.fill(stage, task.steps[batch], task.compiled, rule)

    def alone(self, name: str, batch: int) -> dict[str, Any]:
        """Run copies of one task, as many as there are stages with enough memory for it."""
        able = [free for free in self.size.free_gib if fits(_need_gib(name, batch), free)]
        return self.together([(name, batch)] * len(able))

    def together(self, tasks: list[tuple[str, int]]) -> dict[str, Any]:
        """Place and run tasks in the order of their submission, and return the results by each rule."""
        placed = place([_need_gib(*task) for task in tasks], self.size.free_gib)
        running = [None if number is None else tasks[number] for number in served(placed, STAGES)]
        return {
            "placed": [{"task": name, "stage": stage} for (name, _), stage in zip(tasks, placed, strict=True)],
            "runs": [task and task[0] for task in running],  # by stage
            **{rule.value: self._filled(running, rule) for rule in Rule},
        }

    def _filled(self, running: list[tuple[str, int] | None], rule: Rule) -> dict[str, Any]:
        """Return saving, time increase and work by a rule, relative to the training alone."""
        time, late_ns, value_3080, value_ada, work = BubbleTime(), [0], 0.0, 0.0, []
        for stage, one in enumerate(running):
            if one is None:
                done = self.training.idle(stage)
            else:
                task, done = TASKS[one[0]], self._done(stage, *one, rule)
                value_3080 += done.work / task.throughput_3080 * PRICE_3080_H
                value_ada += done.work / task.alone_rate * PRICE_ADA_H / STAGES
            late_ns.append(done.overrun_ns)
            time += done.time
            work.append(done.work / self.training.iterations)
        cost = self.training.counted_ns / 1e9 * PRICE_ADA_H
        # Every overrun on the stage with the largest total is assumed to delay the whole pipeline.
        increase = max(late_ns) / self.training.counted_ns
        return {
            "increase": increase,
            "saving": value_3080 / cost - increase,
            "saving_without_increase": value_3080 / cost,
            "saving_same_gpu": value_ada / cost - increase,  # the side work priced on the GPU that it ran on
            "bubble_time": {part: ns / time.total for part, ns in asdict(time).items()},
            "work_per_iteration": work,  # by stage
        }


def _need_gib(name: str, batch: int) -> int:
    return needed_gib(TASKS[name].steps[batch].memory_bytes)


def study(iterations: int, varying: Varying) -> dict[str, Any]:
    """Return all tables, ready for JSON.

    Args:
        iterations: number of iterations of each training.
    """
    efficiency = {
        "1.2B": fitted_efficiency(SIZES["1.2B"], ITERATION_1_2B_S),
        "3.6B": fitted_efficiency(SIZES["3.6B"], ITERATION_S[4]),
    }
    efficiency["6B"] = efficiency["3.6B"]
    times = [
        {
            "microbatches": m,
            "artifact_s": seconds,
            "simulated_s": main_job(SIZES["3.6B"], m, efficiency["3.6B"]).iteration_s,
        }
        for m, seconds in ITERATION_S.items()
    ]
    tasks, batches = [], []
    for name, size in SIZES.items():
        for microbatches in MICROBATCHES:
            job = main_job(size, microbatches, efficiency[name])
            studied = Studied(size, SimulatedTraining(job, iterations, varying))
            found = {task: studied.alone(task, its.batch) for task, its in TASKS.items()}
            found["mix"] = studied.together([(task, TASKS[task].batch) for task in MIX_WORK])
            case = {"size": name, "microbatches": microbatches, "bubble_share": job.bubble_share}
            compared = (name, microbatches) == COMPARED
            tasks += [
                {**case, "task": task, **its, "artifact": _printed(task) if compared else None}
                for task, its in found.items()
            ]
            if compared:
                batches = _by_batch(studied)
    return {"efficiency": efficiency, "iterations": times, "tasks": tasks, "batches": batches}


def _by_batch(studied: Studied) -> list[dict[str, Any]]:
    return [
        {"task": name, "batch": batch, "step_s": step.mean_ns / 1e9, "memory_bytes": step.memory_bytes}
        | studied.alone(name, batch)
        for name, task in TASKS.items()
        if task.batch == BATCH
        for batch, step in task.steps.items()
    ]


def _printed(name: str) -> dict[str, Any]:
    """Return the artifact's printed results for a task or the mixed workload."""
    if name == "mix":
        work = [total / MIX_ITERATIONS for total in MIX_WORK.values()]
        return {"increase": MIX_INCREASE, "saving": MIX_SAVING, "work_per_iteration": work}
    return {"increase": TASKS[name].increase, "saving_without_increase": TASKS[name].saving}


def saving(row: Mapping[str, Any], by: str) -> float:
    """The saving as in the artifact's tables: without subtracting the time increase for single tasks."""
    return row[by]["saving" if row["task"] == "mix" else "saving_without_increase"]
