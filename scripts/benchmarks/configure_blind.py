"""One profiled training of this machine predicts others: what they take is measured afterwards, on the same machine.

The profile is the first stretch of one training, its *reference*: pp=2 with two virtual stages, four micro-batches of
one sample.  Everything is predicted from it.  Each of the others is then trained in turns with the reference: one is
held while the other goes on.  A shared machine is faster in one minute than in the next, so each prediction is scaled
by what the reference takes in these turns, over what is predicted of the reference itself.  What is judged is thus how
many times as long as the reference each of the others takes.  ``unscaled`` is the error of the bare prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.fill.configure.flags import layout_flags, read_flags
from megatron.fill.configure.latency import iteration, timeline
from megatron.fill.configure.layout import lay_out
from megatron.fill.configure.links import Links
from megatron.fill.configure.passes import Passes, profile_of
from megatron.fill.configure.space import padded
from megatron.fill.mainjob.hardware import GPUS
from megatron.fill.mainjob.model import ModelSpec
from megatron.fill.mainjob.parallel import Parallel, Precision
from megatron.fill.sim.recorded.busy import RecordedMainJob
from megatron.fill.sim.recorded.groups import read_pipeline
from scripts.benchmarks.forked import preload
from scripts.benchmarks.turns import Training, Turn

# Passes are long for what Python takes for each, which does not grow with a pass' layers and samples.
MODEL = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --vocab-size 255"
REST = (
    "--max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --lr-decay-style constant "
    "--mock-data --tokenizer-type NullTokenizer --eval-iters 0 --eval-interval 100000 --log-interval 1 "
    "--train-iters 100000 --exit-signal-handler --fill-profile-only --fill-trace-iterations 5000"
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


REFERENCE = layout(2, 4, chunks=2)
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


def flags(its: Parallel) -> list[str]:
    """All that a training of the layout is started with, but for its run folder."""
    schedule = ["--fill-pipeline-schedule", "gpipe"] if its.schedule == "gpipe" else []
    return [*MODEL.split(), "--global-batch-size", str(its.global_batch), *layout_flags(its), *REST.split(), *schedule]


def train(folder: Path, its: Parallel) -> Training:
    return Training(folder, ["pretrain_gpt.py", *flags(its), "--fill-report", str(folder / "run")], its.pp)


def model() -> ModelSpec:
    return padded(read_flags([*MODEL.split(), "--global-batch-size", "1"]), 1)


def predicted_s(passes: Passes, its: Parallel) -> float:
    """One iteration, with ranks of one host and gloo between them."""
    speed = passes.profiles[0].transfer_bytes_s or 1e12
    row = (speed,) * its.gpus
    links = Links((row,) * its.gpus, ((0.0,) * its.gpus,) * its.gpus, (0,) * its.gpus, rendezvous=True)
    times = iteration(model(), GPUS["a100-80gb"], 1.0, its, lay_out(links, its, range(its.gpus)), passes)
    return timeline(times).period_ns / 1e9


def profile(training: Training, its: Parallel, turn: Turn) -> Passes:
    """From what the records of the reference say of a turn."""
    records, schedule = read_pipeline(training.folder / "run")
    starts = {one.iteration: one.start_ns for one in records[0].iterations}
    job = RecordedMainJob(records, schedule)
    samples = [
        one
        for one in job.samples
        if turn.start_ns <= starts.get(one.iteration - 1, 0)
        and starts.get(one.iteration + 1, turn.end_ns) < turn.end_ns
    ]
    return Passes([profile_of(job, model(), its, samples)])


def measure_blind(folder: Path, profiled: int, rounds: int, each: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """Train all, then compare.

    Args:
        profiled: iterations of the profile.
        rounds: how often a training and the reference take turns; ``each`` the iterations of a turn, the first of
            which does not count.
        only: names of ``OTHERS``; all if empty.
    """
    preload()
    reference = train(folder / "reference", REFERENCE)
    measured: dict[str, tuple[float, list[Turn]]] = {}
    try:
        first = reference.turn(profiled)
        for number, (name, its) in enumerate(OTHERS.items()):
            if only and name not in only:
                continue
            other = train(folder / str(number), its)
            beside = []
            try:
                for _ in range(rounds):
                    beside.append(reference.turn(each))
                    other.turn(each)
                other.end()
            except BaseException:
                other.kill()
                raise
            measured[name] = other.period_s(), beside
        reference.end()
    except BaseException:
        reference.kill()
        raise
    passes = profile(reference, REFERENCE, first)
    own_s = predicted_s(passes, REFERENCE)
    rows = {}
    for name, (found_s, beside) in measured.items():
        said_s, beside_s = predicted_s(passes, OTHERS[name]), reference.period_s(beside)
        scale = beside_s / own_s
        rows[name] = {
            "measured_s": found_s,
            "predicted_s": said_s * scale,
            "error": said_s * scale / found_s - 1,
            "scale": scale,
            "unscaled": said_s / found_s - 1,
        }
    errors = [abs(row["error"]) for row in rows.values()]
    own = own_s / reference.period_s([first]) - 1
    bare = fmean(abs(row["unscaled"]) for row in rows.values())
    figures = {"blind_mean": fmean(errors), "blind_worst": max(errors), "blind_own": own, "blind_unscaled": bare}
    return figures | {"blind": rows}
