"""One profiled training of this machine predicts others: what they take is measured afterwards, on the same machine.

The profile is the first stretch of one training, its *reference*: pp=2 with two virtual stages, four micro-batches of
one sample.  Everything is predicted from it.  Each of the others is then trained in turns with the reference: one is
held while the other goes on.  A shared machine is faster in one minute than in the next, so each prediction is scaled
by what the reference takes in these turns, over what is predicted of the reference itself.  What is judged is thus how
many times as long as the reference each of the others takes.  ``unscaled`` is the error of the bare prediction.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
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
from megatron.fill.records import last_segment
from megatron.fill.sim.recorded.busy import RecordedMainJob
from megatron.fill.sim.recorded.groups import read_pipeline
from megatron.fill.types import RankRecord
from scripts.benchmarks.forked import ForkedRanks, preload

MODEL = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --vocab-size 255"
REST = (
    "--max-position-embeddings 512 --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --lr-decay-style constant "
    "--mock-data --tokenizer-type NullTokenizer --eval-iters 0 --eval-interval 100000 --log-interval 1 "
    "--train-iters 100000 --exit-signal-handler --fill-profile-only --fill-trace-iterations 5000"
)
WARMUP = 3  # iterations of each training that nobody counts
ENDLESS_S = 300.0


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


@dataclass(frozen=True, slots=True)
class Turn:
    """When one of two trainings ran alone; ns of CLOCK_MONOTONIC."""

    start_ns: int
    end_ns: int


def flags(its: Parallel) -> list[str]:
    """All that a training of the layout is started with, but for its run folder."""
    schedule = ["--fill-pipeline-schedule", "gpipe"] if its.schedule == "gpipe" else []
    return [*MODEL.split(), "--global-batch-size", str(its.global_batch), *layout_flags(its), *REST.split(), *schedule]


class Training:
    """One that goes on until it is told to end, and is held between its turns."""

    def __init__(self, folder: Path, its: Parallel) -> None:
        self.its = its
        self.folder = folder
        self._turns: list[Turn] = []
        program = ["pretrain_gpt.py", *flags(its), "--fill-report", str(folder / "run")]
        folder.mkdir()
        self._ranks = ForkedRanks(program, folder / "log", its.pp)
        try:
            self._ranks.wait_for(f" iteration {WARMUP:8}/", ENDLESS_S)
            begun_s = time.monotonic()
            self._ranks.wait_for(f" iteration {WARMUP + 2:8}/", ENDLESS_S)
        except BaseException:
            self._ranks.kill()
            raise
        self.about_s = (time.monotonic() - begun_s) / 2
        self._ranks.hold()

    def turn(self, iterations: int) -> Turn:
        """Let it run for about so many iterations, and then hold it."""
        start_ns = time.monotonic_ns()
        self._ranks.let_go()
        time.sleep(self.about_s * (iterations + 0.5))
        end_ns = time.monotonic_ns()
        self._ranks.hold()
        self._turns.append(Turn(start_ns, end_ns))
        return self._turns[-1]

    def end(self) -> None:
        """Well, with its records written."""
        self._ranks.ask_to_end()
        self._ranks.wait(ENDLESS_S)

    def kill(self) -> None:
        self._ranks.kill()

    def records(self) -> list[RankRecord]:
        return list(last_segment(self.folder / "run").records())

    def period_s(self, turns: Sequence[Turn] | None = None) -> float:
        """The median time from one iteration's start to the next one's, inside of turns (None: all its own)."""
        chosen = self._turns if turns is None else turns
        return median(periods_s([one.start_ns for one in self.records()[0].iterations], chosen))


def periods_s(starts_ns: Sequence[int], turns: Sequence[Turn]) -> list[float]:
    """From start to start of the iterations that were whole inside of a turn, but for the first of each."""
    found = []
    for turn in turns:
        inside = [start for start in starts_ns if turn.start_ns <= start <= turn.end_ns]
        found += [(after - before) / 1e9 for before, after in pairwise(inside[1:])]
    if not found:
        raise RuntimeError("no turn had three whole iterations; expected longer turns")
    return found


def model() -> ModelSpec:
    return padded(read_flags([*MODEL.split(), "--global-batch-size", "1"]), 1)


def predicted_s(passes: Passes, its: Parallel) -> float:
    """One iteration, with ranks of one host and gloo between them."""
    speed = passes.profiles[0].transfer_bytes_s or 1e12
    row = (speed,) * its.gpus
    links = Links((row,) * its.gpus, ((0.0,) * its.gpus,) * its.gpus, (0,) * its.gpus, rendezvous=True)
    times = iteration(model(), GPUS["a100-80gb"], 1.0, its, lay_out(links, its, range(its.gpus)), passes)
    return timeline(times).period_ns / 1e9


def profile(training: Training, turn: Turn) -> Passes:
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
    return Passes([profile_of(job, model(), training.its, samples)])


def measure_blind(folder: Path, profiled: int, rounds: int, each: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """Train all, then compare.

    Args:
        profiled: iterations of the profile.
        rounds: how often a training and the reference take turns; ``each`` the iterations of a turn, the first of
            which does not count.
        only: names of ``OTHERS``; all if empty.
    """
    preload()
    reference = Training(folder / "reference", REFERENCE)
    measured: dict[str, tuple[float, list[Turn]]] = {}
    try:
        first = reference.turn(profiled)
        for number, (name, its) in enumerate(OTHERS.items()):
            if only and name not in only:
                continue
            other = Training(folder / str(number), its)
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
    passes = profile(reference, first)
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
