"""What plans get done in a main job's bubbles: parts of ``sim_pipefill.py`` that need no clock.

One job per GPU, and always one waiting, of every kind that fits as many.  GPUs' worth is the fill work in GPUs that
have nothing else to do; gain is it over what the main job computes, in device time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from megatron.fill.pipeline.bubbles import ideal_bubble_share
from megatron.fill.wings.mainjob.hardware import GIB, NETWORKS
from megatron.fill.wings.mainjob.model import MODELS
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute
from megatron.fill.wings.sim.cluster.rates import Rates
from megatron.fill.wings.sim.filljobs.catalog import catalog_kinds
from megatron.fill.wings.sim.filljobs.generate import fill_capacity
from megatron.fill.wings.sim.mainjob import MainJob
from megatron.fill.wings.sim.sweep import run_all
from megatron.fill.wings.sim.values import DeviceGroup, FillKind, RuntimeModel
from scripts.benchmarks.sim_paper import GPU, PAPER_WORTH_8K, SCALES, SMALL_GPU, filled, main_job

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 3}  # chunks: three layers per stage are three virtual stages
LENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # times as long as the main job's bubbles are
FREE_GIB = (1, 2, 3, 4, 6, 8, 12, 24)
STEP_EFFICIENCIES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
PHYSICAL_STAGES, PHYSICAL_MICROBATCHES = 8, 16


def physical_job(schedule: str = "1f1b", microbatches: int = PHYSICAL_MICROBATCHES) -> MainJob:
    """5 billion parameters on 128 GPUs, the size of the paper's cluster.

    Assumed: V100 with 16 GB in p3.16xlarge nodes, 8 stages of 8 data-parallel and 2 tensor-parallel ranks,
    micro-batches of 1, full recomputation, fp16, the shape of ``gpt-5b``, 45% of the peak.
    """
    tp, dp, microbatch = 2, 8, 1
    parallel = Parallel(
        tp=tp,
        pp=PHYSICAL_STAGES,
        dp=dp,
        chunks=SCHEDULES[schedule],
        microbatch=microbatch,
        global_batch=dp * microbatch * microbatches,
        schedule=schedule,
        recompute=Recompute.FULL,
        sequence_parallel=True,
        precision=Precision.FP16,
    )
    return MainJob("gpt-5b", MODELS["gpt-5b"], SMALL_GPU, NETWORKS["p3.16xlarge"], parallel)


def use(groups: Sequence[DeviceGroup], kinds: Sequence[FillKind], runtime: RuntimeModel) -> dict[str, float]:
    """Bubbles of the iteration, GPUs' worth, gain, and what a second of bubble is worth in seconds alone."""
    devices = sum(group.count for group in groups)
    bubbles = sum(group.count * group.cycle.bubble_ns / group.cycle.period_ns for group in groups)
    worth = fill_capacity(groups, kinds, runtime=runtime)
    return {
        "bubble_share": bubbles / devices,
        "gpus_worth": worth,
        "gain": worth / (devices - bubbles),
        "per_bubble_second": worth / bubbles,
    }


def _free_gib(groups: Iterable[DeviceGroup]) -> dict[str, float]:
    free = [slot.free_bytes / GIB for group in groups for slot in group.cycle.slots]
    return {"free_gib_least": min(free), "free_gib_most": max(free)}


def kinds_alone_and_in_bubbles(efficiency: float, runtime: RuntimeModel) -> list[dict[str, Any]]:
    """Each kind by itself: a second of bubble in seconds alone, and the configuration that most devices choose."""
    rows: list[dict[str, Any]] = []
    for gpus, gpu in ((8192, GPU), (8192, SMALL_GPU), (1024, GPU)):
        groups = main_job(SCALES[gpus], efficiency, gpu).groups()
        rows += [
            {"gpus": gpus, "gpu": gpu.name, "kind": kind.name, **kind_in_bubbles(groups, kind, runtime)}
            for kind in catalog_kinds(gpu)
        ]
    return rows


def kind_in_bubbles(groups: Sequence[DeviceGroup], kind: FillKind, runtime: RuntimeModel) -> dict[str, Any]:
    """One kind's rates, and the configurations alone and in bubbles; None where it does not fit."""
    chosen: Counter[str] = Counter()
    memory: dict[str, float] = {}
    for group in groups:
        fit = Rates(group.cycle, [kind], runtime).whole.fits.get(kind.name)
        if fit is not None:
            name = str(fit.plan.configuration)
            chosen[name] += group.count
            memory[name] = fit.profile.memory_bytes / GIB
    alone = max(kind.profiles, key=lambda profile: profile.work / profile.duration_ns)
    most = chosen.most_common(1)[0][0] if chosen else None
    return {
        "relative": use(groups, [kind], runtime)["per_bubble_second"],
        "alone_per_s": kind.alone_rate,
        "configuration_alone": str(alone.configuration),
        "memory_alone_gib": alone.memory_bytes / GIB,
        "configuration": most,
        "memory_gib": memory[most] if most else None,
        "devices": chosen.total(),
        "configurations": len(chosen),
    }


def schedules(efficiency: float, runtime: RuntimeModel) -> list[dict[str, Any]]:
    """GPipe, 1F1B and interleaved 1F1B of the 40B main job; interleaved needs as many micro-batches as stages."""
    rows = []
    for gpus in (1024, 4096, 8192):
        plain = main_job(SCALES[gpus], efficiency)
        for name, chunks in SCHEDULES.items():
            if chunks > 1 and plain.microbatches < plain.parallel.pp:
                continue
            job = replace(plain, parallel=replace(plain.parallel, schedule=name, chunks=chunks))
            rows.append({"gpus": gpus, "schedule": name, **_described(job, runtime)})
    return rows


def physical(runtime: RuntimeModel) -> list[dict[str, Any]]:
    """The 5B main job by schedule and micro-batches; where memory does not do, a row says so."""
    rows: list[dict[str, Any]] = []
    for microbatches in (8, 16, 32, 64):
        for name in SCHEDULES:
            row = {"microbatches": microbatches, "schedule": name}
            try:
                rows.append(row | _described(physical_job(name, microbatches), runtime))
            except ValueError as error:
                rows.append(row | {"impossible": str(error)})
    return rows


def _described(job: MainJob, runtime: RuntimeModel) -> dict[str, Any]:
    groups = job.groups()
    its = job.parallel
    found = use(groups, catalog_kinds(job.gpu), runtime)
    return {
        "iteration_s": job.iteration_s,
        "tflops_per_gpu": job.tflops_per_gpu,
        "ideal_bubble_share": ideal_bubble_share(its.pp, its.microbatches, its.chunks),
        **_free_gib(groups),
        **found,
    }


def stretched(groups: Sequence[DeviceGroup], factor: float) -> tuple[DeviceGroup, ...]:
    """With bubbles so many times as long, and everything else as it was."""
    found = []
    for group in groups:
        slots = [replace(slot, duration_ns=round(slot.duration_ns * factor)) for slot in group.cycle.slots]
        added_ns = sum(slot.duration_ns for slot in slots) - group.cycle.bubble_ns
        cycle = replace(group.cycle, period_ns=group.cycle.period_ns + added_ns, slots=tuple(slots))
        found.append(replace(group, cycle=cycle))
    return tuple(found)


def with_memory(groups: Sequence[DeviceGroup], free_gib: float) -> tuple[DeviceGroup, ...]:
    """With so much free memory in every bubble."""
    found = []
    for group in groups:
        slots = tuple(replace(slot, free_bytes=round(free_gib * GIB)) for slot in group.cycle.slots)
        found.append(replace(group, cycle=replace(group.cycle, slots=slots)))
    return tuple(found)


def sensitivity(efficiency: float, runtime: RuntimeModel) -> list[dict[str, Any]]:
    """The 40B main job on 8K GPUs with longer and shorter bubbles, and more and less free memory in them."""
    groups = main_job(SCALES[8192], efficiency).groups()
    kinds = catalog_kinds(GPU)
    rows = []
    for factor in LENGTHS:
        longer = stretched(groups, factor)
        seconds = [slot.duration_ns / 1e9 for group in longer for slot in group.cycle.slots]
        for gib in FREE_GIB:
            roomy = with_memory(longer, gib)
            fit = len(Rates(roomy[0].cycle, kinds, runtime).whole.fits)
            row = {"length": factor, "mean_bubble_s": fmean(seconds), "free_gib": gib, "kinds_that_fit": fit}
            rows.append(row | use(roomy, kinds, runtime))
    return rows


def loss(efficiency: float, runtime: RuntimeModel) -> dict[str, Any]:
    """The 8K study where steps are slower in bubbles than alone, and how slow gives the paper's GPUs' worth."""
    groups = main_job(SCALES[8192], efficiency).groups()
    kinds = catalog_kinds(GPU)
    cases = [(efficiency, replace(runtime, step_efficiency=one)) for one in STEP_EFFICIENCIES]
    with_tail: list[float] = run_all(_tail_worth, cases)
    rows = []
    for one, tail_worth in zip(STEP_EFFICIENCIES, with_tail, strict=True):
        found = use(groups, kinds, replace(runtime, step_efficiency=one))
        rows.append({"step_efficiency": one, **found, "gpus_worth_with_tail": tail_worth})

    meets = {
        name: interpolated([(row[key], row["step_efficiency"]) for row in rows], PAPER_WORTH_8K)
        for name, key in (("one_job", "gpus_worth"), ("with_tail", "gpus_worth_with_tail"))
    }
    main = rows[0]["gpus_worth"] / rows[0]["gain"]
    return {
        "paper_gpus_worth": PAPER_WORTH_8K,
        "meets_paper_at": meets,
        "gain_of_paper_gpus_worth": PAPER_WORTH_8K / main,
        "rows": rows,
    }


def _tail_worth(task: tuple[float, RuntimeModel]) -> float:
    efficiency, runtime = task
    return filled(main_job(SCALES[8192], efficiency), catalog_kinds(GPU), runtime).gpus_worth


def interpolated(points: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """On the line between the two neighbouring (x, y) points, y at x; None outside of them."""
    ordered = sorted(points)
    for (x, y), (next_x, next_y) in pairwise(ordered):
        if x <= wanted <= next_x:
            return y + (next_y - y) * (wanted - x) / (next_x - x)
    return None
