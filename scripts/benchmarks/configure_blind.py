"""One profiled training of this machine predicts others: what they take is measured afterwards, on the same machine.

The profile is one training, the *reference*: pp=2 with two virtual stages, four micro-batches of one sample, and six
layers, of which the second rank has four.  So it tells what a pass takes beside its layers, where cores are alike.  On
a shared machine they are not, so it is trained twice, with the ranks on each other's cores, and the mean counts.  All
others are predicted from it alone.

A shared machine is faster in one minute than in the next.  So all trainings take turns, round after round: one goes on
while the others are held.  Turns of one training still differ, so each has many, and its time a standard error.  One of
a single stage has another like it beside it, so that all cores are busy, as in the others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.fill.wings.configure.flags import layout_flags, read_flags
from megatron.fill.wings.configure.latency import iteration, timeline
from megatron.fill.wings.configure.layout import lay_out
from megatron.fill.wings.configure.links import Links
from megatron.fill.wings.configure.passes import Both, Passes, Profile, profile_of
from megatron.fill.wings.configure.space import padded
from megatron.fill.wings.mainjob.hardware import GPUS
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision
from megatron.fill.wings.sim.recorded.busy import RecordedMainJob
from megatron.fill.wings.sim.recorded.groups import read_pipeline
from scripts.benchmarks.forked import preload
from scripts.benchmarks.turns import Training

# Passes are long for what Python takes for each, which does not grow with a pass' layers and samples.
MODEL = "--hidden-size 512 --num-attention-heads 8 --seq-length 256 --vocab-size 255"
LAYERS = 4
REST = (
    "--max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --lr-decay-style constant "
    "--mock-data --tokenizer-type NullTokenizer --eval-iters 0 --eval-interval 100000 --log-interval 1 "
    "--train-iters 100000 --exit-signal-handler --fill-profile-only --fill-settings " + '{"trace_iterations":5000}'
)


def layout(pp: int, microbatches: int, microbatch: int = 1, chunks: int = 1, schedule: str = "1f1b") -> Parallel:
    """One replica."""
    return Parallel(
        pp=pp,
        chunks=chunks,
        microbatch=microbatch,
        global_batch=microbatch * microbatches,
        schedule="interleaved" if chunks > 1 else schedule,
        precision=Precision.FP32,
    )


REFERENCE, REFERENCE_LAYERS = replace(layout(2, 4, chunks=2), first_layers=2), 6
OTHERS = {
    "1 stage, 2 micro-batches": layout(1, 2),
    "1 stage, 1 micro-batch of 2": layout(1, 1, 2),
    "1f1b, 2 micro-batches": layout(2, 2),
    "1f1b, 4 micro-batches": layout(2, 4),
    "1f1b, 7 micro-batches": layout(2, 7),
    "1f1b, 4 micro-batches of 2": layout(2, 4, 2),
    "1f1b, 2 micro-batches of 4": layout(2, 2, 4),
    "gpipe, 4 micro-batches": layout(2, 4, schedule="gpipe"),
    "gpipe, 3 micro-batches of 2": layout(2, 3, 2, schedule="gpipe"),
    "2 virtual stages, 2 micro-batches": layout(2, 2, chunks=2),
    "2 virtual stages, 6 micro-batches": layout(2, 6, chunks=2),
    "2 virtual stages, 2 micro-batches of 2": layout(2, 2, 2, chunks=2),
}


def flags(its: Parallel, layers: int = LAYERS) -> list[str]:
    """All that a training of the layout is started with, but for its run folder."""
    schedule = ["--fill-pipeline-schedule", "gpipe"] if its.schedule == "gpipe" else []
    size = ["--num-layers", str(layers), "--global-batch-size", str(its.global_batch)]
    return [*MODEL.split(), *size, *layout_flags(its), *REST.split(), *schedule]


def train(folder: Path, its: Parallel, layers: int = LAYERS, core: int = 0) -> Training:
    return Training(
        folder, ["pretrain_gpt.py", *flags(its, layers), "--fill-report", str(folder / "run")], its.pp, core
    )


def model(layers: int = LAYERS) -> ModelSpec:
    return padded(read_flags(["--num-layers", str(layers), *MODEL.split(), "--global-batch-size", "1"]), 1)


def predicted_s(passes: Passes, its: Parallel, layers: int = LAYERS) -> float:
    """One iteration, with ranks of one host and gloo between them."""
    speed = passes.profiles[0].transfer_bytes_s or 1e12
    row = (speed,) * its.gpus
    links = Links((row,) * its.gpus, ((0.0,) * its.gpus,) * its.gpus, (0,) * its.gpus, rendezvous=True)
    times = iteration(model(layers), GPUS["a100-80gb"], 1.0, its, lay_out(links, its, range(its.gpus)), passes)
    return timeline(times).period_ns / 1e9


def profile(reference: Training) -> Profile:
    """From what the records of the reference say of its turns."""
    records, schedule = read_pipeline(reference.folder / "run")
    starts = {one.iteration: one.start_ns for one in records[0].iterations}

    def whole(iteration: int) -> bool:
        before_ns, after_ns = starts.get(iteration - 1), starts.get(iteration + 1)
        if before_ns is None or after_ns is None:
            return False
        return any(turn.start_ns <= before_ns and after_ns <= turn.end_ns for turn in reference.turns)

    job = RecordedMainJob(records, schedule)
    samples = [one for one in job.samples if whole(one.iteration)]
    return profile_of(job, model(REFERENCE_LAYERS), REFERENCE, samples)


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Of several of one layout."""

    def mean(part: str) -> Both:
        each: list[Both] = [getattr(one, part) for one in profiles]
        return Both(fmean(one.forward_ns for one in each), fmean(one.backward_ns for one in each))

    transfers = [one.transfer_bytes_s for one in profiles if one.transfer_bytes_s]
    return replace(
        profiles[0],
        layer=mean("layer"),
        first=mean("first"),
        last=mean("last"),
        fixed=mean("fixed"),
        step_s_per_parameter=fmean(one.step_s_per_parameter for one in profiles),
        transfer_bytes_s=fmean(transfers) if transfers else None,
        step_s=fmean(one.step_s for one in profiles),
        waits=fmean(one.waits for one in profiles),
    )


def measure_blind(folder: Path, rounds: int, each: int) -> dict[str, Any]:
    """Train all, then compare.

    Args:
        rounds: turns of each training; ``each`` the iterations of a turn, the first of which does not count.
    """
    preload()
    with ExitStack() as stack:

        def started(name: str, *given: Any, **named: Any) -> Training:
            training = train(folder / name, *given, **named)
            stack.callback(training.kill)
            return training

        references = [started(f"reference-{core}", REFERENCE, REFERENCE_LAYERS, core) for core in range(2)]
        others = {
            name: [started(f"{number}-{core}", its, core=core) for core in range(2 if its.pp == 1 else 1)]
            for number, (name, its) in enumerate(OTHERS.items())
        }
        order = [*([one] for one in references), *others.values()]
        shuffled = random.Random(0)
        for _ in range(rounds):
            shuffled.shuffle(order)  # else what comes again every minute might always meet the same one
            for like in order:
                like[0].turn(each, beside=like[1:])
        for like in order:
            for one in like:
                one.end()
    passes = Passes([mean_profile([profile(one) for one in references])])
    rows = {}
    for name, like in others.items():
        (found_s, error_s), said_s = like[0].period_s(), predicted_s(passes, OTHERS[name])
        rows[name] = {
            "measured_s": found_s,
            "standard_error": error_s / found_s,
            "predicted_s": said_s,
            "error": said_s / found_s - 1,
        }
    errors = [abs(row["error"]) for row in rows.values()]
    own = predicted_s(passes, REFERENCE, REFERENCE_LAYERS) / fmean(one.period_s()[0] for one in references) - 1
    return {"blind_mean": fmean(errors), "blind_worst": max(errors), "blind_own": own, "blind": rows}
