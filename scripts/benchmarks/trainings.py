"""The trainings of the benchmarks: a small GPT in two pipeline stages, and what filling costs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron.fill.records.segment import last_segment
from megatron.fill.report.slowdown import paired_slowdown
from megatron.fill.types import Iteration, fills_block

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--pipeline-model-parallel-size 2 --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 128",
    "--max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant",
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 0 --eval-interval 100000",
    "--log-interval 1 --tensorboard-log-interval 1",
)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The iterations of a run: a warm-up, then pairs of blocks, one with filling and one without.

    Attributes:
        length: iterations per block.
        warmup: iterations before the first block.
        settling: pairs more, in which the jobs set themselves up; they do not count until all ranks' jobs have stepped.
    """

    length: int
    pairs: int
    warmup: int
    settling: int = 0

    @property
    def iterations(self) -> int:
        return self.warmup + 2 * self.length * (self.pairs + self.settling)

    def block_of(self, iteration: int) -> int:
        """The block of an iteration (from 1), as the runtime counts them; -1 in the warm-up."""
        return (iteration - 1 - self.warmup) // self.length if iteration > self.warmup else -1

    def fills(self, iteration: int) -> bool:
        return fills_block(self.block_of(iteration))

    def mark(self, iterations: Iterable[Iteration]) -> list[Iteration]:
        """Those of a run that knew of no blocks."""
        return [
            replace(one, filling=self.fills(one.iteration), block=self.block_of(one.iteration)) for one in iterations
        ]


@dataclass(frozen=True, slots=True)
class MainJob:
    """What is trained.

    Attributes:
        script: a script, or ``-m`` and a module with its arguments.
        environment: variables besides those of this process.
    """

    script: tuple[str, ...] = ("pretrain_gpt.py",)
    flags: tuple[str, ...] = MODEL
    ranks: int = 2
    environment: dict[str, str] = field(default_factory=dict)


GPT = MainJob()


def launcher(ranks: int) -> list[str]:
    """Start a script, which comes next, on so many ranks of this machine, whatever its name leads to."""
    standalone = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    return [sys.executable, "-m", "torch.distributed.run", *standalone]


def command(iterations: int, log_dir: Path, script: Sequence[str], *extra: str, main: MainJob = GPT) -> list[str]:
    ours = ["--train-iters", str(iterations), "--tensorboard-dir", str(log_dir), *extra]
    return [*launcher(main.ranks), *script, *" ".join(main.flags).split(), *ours]


@contextmanager
def training(
    arguments: list[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A training whose output goes to ``log`` and, line by line, to the caller.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    process = subprocess.Popen(
        arguments,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
    )
    try:
        yield process
    finally:
        assert process.stdout is not None
        rest = process.stdout.read()
        process.wait()
        log.write_text(rest, encoding="utf-8")
    if process.returncode:
        raise RuntimeError(f"the training failed with status {process.returncode}:\n{rest[-3000:]}")


def train(folder: Path, name: str, blocks: Blocks, script: Sequence[str], *extra: str, main: MainJob = GPT) -> None:
    """Train to the end, anew; losses are in ``folder / name``, the output is in ``NAME.log`` beside it."""
    for old in (folder / name, folder / f"{name}-run"):
        shutil.rmtree(old, ignore_errors=True)
    arguments = command(blocks.iterations, folder / name, script, *extra, main=main)
    with training(arguments, folder / f"{name}.log", main.environment):
        pass


def settings(**values: Any) -> list[str]:
    """Return the flags for settings that are no flags."""
    return ["--fill-settings", json.dumps(values)]  # JSON is YAML


def jobs_file(path: Path, jobs: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"jobs": jobs}), encoding="utf-8")  # JSON is YAML
    return path


def filled(folder: Path, name: str, jobs: Path, blocks: Blocks, *extra: str, main: MainJob = GPT) -> dict[str, Any]:
    """Train with jobs in the bubbles, in paired blocks; the report.  The records are in ``NAME-run``."""
    run = folder / f"{name}-run"
    flags = ["--fill-jobs", str(jobs), "--fill-report", str(run), "--fill-paired-blocks", str(blocks.length)]
    flags += [*settings(warmup_iterations=blocks.warmup), *extra]
    train(folder, name, blocks, main.script, *flags, main=main)
    return json.loads((run / "report.json").read_text(encoding="utf-8"))


def identical(folder: Path, jobs: Path, blocks: Blocks, *extra: str, main: MainJob = GPT) -> dict[str, Any]:
    """Train with jobs and without; whether the losses are the same to the bit, and what the jobs' start costs."""
    filled(folder, "jobs", jobs, blocks, *extra, main=main)
    train(folder, "no-jobs", blocks, main.script, "--fill-report", str(folder / "no-jobs-run"), main=main)
    with_jobs = losses(folder / "jobs")
    if len(with_jobs) != blocks.iterations:
        raise RuntimeError(f"{len(with_jobs)} losses of {blocks.iterations} iterations in {folder / 'jobs'}")
    return {
        "losses_compared": len(with_jobs),
        "losses_identical_to_no_jobs": with_jobs == losses(folder / "no-jobs"),
        "startup_s": startup_s(iterations_of(folder / "jobs-run"), blocks.mark(iterations_of(folder / "no-jobs-run"))),
    }


def losses(log_dir: Path, scalar: str = "lm loss") -> dict[int, float]:
    """The loss of every iteration, or another scalar, as TensorBoard has it: float32, to the bit."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(log_dir), size_guidance={"scalars": 0})
    events.Reload()
    return {event.step: event.value for event in events.Scalars(scalar)}


def iterations_of(run: Path) -> Sequence[Iteration]:
    """Those of rank 0."""
    return next(last_segment(run).records()).iterations


def slowdown_of(iterations: Sequence[Iteration]) -> dict[str, Any]:
    slowdown = paired_slowdown(iterations)
    assert slowdown is not None
    return {"mean": slowdown.mean, "ci95": list(slowdown.ci95), "pairs": slowdown.pairs}


def p99_slowdown(iterations: Sequence[Iteration]) -> float:
    """How much longer the 99th percentile of a rank's iterations is in the blocks with filling."""
    times = {
        on: [one.end_ns - one.start_ns for one in iterations if one.block >= 0 and one.filling is on]
        for on in (True, False)
    }
    return float(np.percentile(times[True], 99) / np.percentile(times[False], 99)) - 1


def startup_s(with_jobs: Sequence[Iteration], without: Sequence[Iteration]) -> float:
    """What the start of the jobs costs the main job, in seconds: how much longer its warm-up takes with them.

    In each run the warm-up counts by what it takes beyond the run's usual iterations without filling, since a machine
    is faster in one run than in another.

    Args:
        with_jobs, without: the iterations of two runs with the same blocks.
    """
    return _warmup_excess_s(with_jobs) - _warmup_excess_s(without)


def _warmup_excess_s(iterations: Sequence[Iteration]) -> float:
    usual_ns = median(one.end_ns - one.start_ns for one in iterations if one.block >= 0 and not one.filling)
    return sum(one.end_ns - one.start_ns - usual_ns for one in iterations if one.block < 0) / 1e9
