"""The parts of bench_gpu.py: what each trains, and the figures of it."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from megatron.fill.records.segment import last_segment
from scripts.benchmarks.emulated import Emulation, emulation, why_not
from scripts.benchmarks.gpu_figures import ITERATION, check_steps, of_run, per_iteration_ms, times_ms
from scripts.benchmarks.gpu_models import model_flags
from scripts.benchmarks.gpu_ungated import beside_the_training
from scripts.benchmarks.harness import PIPEFILL
from scripts.benchmarks.one_gpu import beside_ghosts
from scripts.benchmarks.trainings import Blocks, iterations_of, jobs_file, p99_slowdown, settings, slowdown_of

TASK = "megatron.fill.sidetask.training:TrainingJob"
JOBS: dict[str, dict[str, Any]] = {  # by device: on a GPU, nodes of some milliseconds
    "cuda": {"model": "bert-base", "batch_size": 64, "micro_batch_sizes": [64], "pieces": 8, "steps": 10_000_000},
    "cpu": {
        "model": "bert-base",
        "model_args": {"size": "tiny"},
        "batch_size": 8,
        "micro_batch_sizes": [8],
        "pieces": 4,
        "steps": 10_000_000,
    },
}
_LOSS = re.compile(r"lm loss: (\S+)")
_WEIGHTS = re.compile(r"ghosts: weights after \d+ iterations: sha256 (\w+)")
_EXPECTED = re.compile(r"ghosts: stage .* in ms of ([\d.]+): (.*)")
WITHOUT_WAITS = 5  # iterations at the beginning, in which ghosts measure
_IDENTITY_PAIRS = 1
_PACE_ITERATIONS = 5
_NOT_EMULATED = "the rehearsal is without emulation, so jobs set themselves up in the warm-up, unlike on a GPU"
_BUBBLES_ITERATIONS = {"cuda": 20, "cpu": 10}  # a rehearsal is small
_MARKS_ITERATIONS = {"cuda": 40, "cpu": 10}
PROFILE_S, START_S, END_S = 45.0, 30.0, 5.0  # of a profile; from a training's start to its first iteration; of its end


def blocks_of(options: argparse.Namespace, pace_s: float) -> Blocks:
    """Blocks for a training with jobs, which set themselves up in the bubbles after its warm-up.

    Args:
        pace_s: how long an iteration takes.
    """
    settling = math.ceil(options.startup_seconds / pace_s / (2 * options.block))
    return Blocks(options.block, options.pairs, options.warmup, settling)


def least_s(part: str, options: argparse.Namespace, device: str, pace_s: float) -> float:
    """The least seconds that a part takes where profile and pace are known already."""
    blocks = blocks_of(options, pace_s)

    def training_s(iterations: int) -> float:
        return START_S + (WITHOUT_WAITS + iterations) * pace_s + END_S

    match part:
        case "profile":
            return PROFILE_S + training_s(_PACE_ITERATIONS)
        case "bubbles":
            return training_s(options.warmup + _BUBBLES_ITERATIONS[device])
        case "identity":
            return 2 * training_s(replace(blocks, pairs=min(options.pairs, _IDENTITY_PAIRS)).iterations)
        case "no-gate":
            return START_S + training_s(replace(blocks, settling=0).iterations)
        case "marks":
            return 2 * training_s(options.warmup + _MARKS_ITERATIONS[device])
        case _:
            return training_s(blocks.iterations) + options.baseline_seconds


@dataclass(frozen=True, slots=True)
class Bench:
    """One variant, and where it is measured.

    Attributes:
        device: ``cuda`` or ``cpu``.
        left_s: how long a part that begins now may take; None for ever.
    """

    options: argparse.Namespace
    device: str
    folder: Path
    left_s: Callable[[], float | None]

    @property
    def blocks(self) -> Blocks:
        """Those of a training with jobs."""
        return blocks_of(self.options, self.pace_s())

    def pace_s(self) -> float:
        """How long an iteration with waits takes without jobs, in s: from a short training, unless there was one."""
        options = self.options
        name = f"pace-{self.device}-{options.waits}-{options.schedule}-{options.model}-{options.stage}"
        path = self.folder.parent / f"{name}.json"  # of all ways to share the GPU, and of all guards
        if not path.exists():
            found = times_ms(self.trained("pace", _PACE_ITERATIONS))[WITHOUT_WAITS:]
            path.write_text(json.dumps(median(found)), encoding="utf-8")
        return float(json.loads(path.read_text(encoding="utf-8"))) / 1000

    def check_time(self, part: str) -> None:
        """Refuse a part that cannot be done in the time that is left.

        Raises:
            RuntimeError: how long it takes at least, and how long there is.
        """
        least = least_s(part, self.options, self.device, self.pace_s())  # which takes time itself
        left = self.left_s()
        if left is not None and left < least:
            raise RuntimeError(f"it takes {least:.0f} s at least, and {left:.0f} s are left")

    def flags(self, iterations: int) -> list[str]:
        """Megatron's."""
        options = self.options
        flags = model_flags(
            options.model,
            self.device,
            options.stages,
            options.microbatches,
            options.schedule,
            options.distributed_timeout_minutes,
        )
        return [*flags, "--train-iters", str(iterations), *options.extra.split()]

    def trained(self, name: str, iterations: int, *flags: str, slow: bool = True) -> list[str]:
        """Train the real stage beside ghosts, for so many iterations with waits; the lines of its output."""
        with self.begun(name, iterations, *flags, slow=slow) as lines:
            return list(lines)

    def begun(
        self, name: str, iterations: int, *flags: str, slow: bool = True
    ) -> AbstractContextManager[Iterator[str]]:
        """The same while it runs.

        Args:
            slow: on a CPU, whose core the job shares also while it starts, bubbles in which it gets somewhere.
        """
        ghosts = ["--stage", str(self.options.stage), "--waits", self.options.waits]
        ghosts += ["--forward-ms", "20", "--backward-ms", "40"] if slow and self.device == "cpu" else []
        arguments = [*self.flags(WITHOUT_WAITS + iterations), *flags]
        # As on a GPU, nothing but the gate keeps jobs from the training, their start included.
        emulated = emulation(Emulation.COMPLETION) if self.device == "cpu" and not why_not() else {}
        return beside_ghosts(ghosts, arguments, self.folder / f"{name}.log", self.left_s(), emulated)

    def run(self, name: str) -> Path:
        """A run folder, empty."""
        folder = self.folder / f"{name}-run"
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def job(self) -> dict[str, Any]:
        return {"name": "bert", "task": TASK, "args": JOBS[self.device], "memory": self.options.memory}

    def filling(self, name: str) -> list[str]:
        """The flags to run the job, whose profile is in the store already.  No brake: it would end what is measured."""
        self.profiles()
        store = self.folder / f"{name}.db"
        shutil.copy(self._store, store)
        file = jobs_file(self.folder / f"{name}.yaml", [self.job()])
        flags = ["--fill-jobs", str(file), "--fill-store", str(store), "--fill-report", str(self.run(name))]
        flags += ["--fill-max-slowdown", "0", *settings(warmup_iterations=self.blocks.warmup)]
        if self.options.guard_us is not None:
            flags += settings(guard_us=self.options.guard_us)
        if self.device == "cuda":
            flags += ["--fill-sharing", self.options.sharing]
        elif lacking := why_not():
            print(f"bench_gpu: {_NOT_EMULATED}: {lacking}", flush=True)
        return flags

    @property
    def _store(self) -> Path:
        return self.folder.parent / f"jobs-{self.device}.db"

    def profiles(self) -> dict[str, Any]:
        """Measure the job alone, into a store, unless that was done in this folder."""
        path = self._store.with_suffix(".json")
        if not path.exists():
            self._store.unlink(missing_ok=True)
            device = "cuda:0" if self.device == "cuda" else "cpu"
            file = jobs_file(self._store.with_suffix(".yaml"), [self.job()])
            command = [*PIPEFILL, "profile", str(file), "--device", device, "--store", str(self._store), "--json"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=self.left_s())
            if done.returncode:
                raise RuntimeError(f"the job cannot be profiled: {done.stderr[-2000:]}")
            path.write_text(done.stdout, encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))


def profile(bench: Bench) -> dict[str, Any]:
    """The job by itself: its nodes; and how long an iteration of the training takes, which later parts need."""
    found = bench.profiles()["bert"]
    nodes_ms = [node["duration_ns"] / 1e6 for node in found[0]["nodes"]]
    return {"configurations": len(found), "nodes": len(nodes_ms), "iteration_ms": sum(nodes_ms),
            "longest_node_ms": max(nodes_ms), "pace_ms": bench.pace_s() * 1000}  # fmt: skip


def bubbles(bench: Bench) -> dict[str, Any]:
    """Without jobs: whether bubbles are as long as the ghosts wait, in ms of an iteration."""
    run = bench.run("bubbles")
    iterations = bench.options.warmup + _BUBBLES_ITERATIONS[bench.device]
    lines = bench.trained("bubbles", iterations, "--fill-report", str(run), slow=False)
    period, kinds = next(match.groups() for line in lines if (match := _EXPECTED.search(line)))
    expected = {kind: float(ms) for kind, ms in re.findall(r"([\w-]+) ([\d.]+)", kinds)}
    record = next(last_segment(run).records())
    counted = {one.iteration for one in record.iterations if one.iteration > WITHOUT_WAITS + bench.options.warmup}
    measured = per_iteration_ms(record.bubbles, counted)
    times_ms = [(one.end_ns - one.start_ns) / 1e6 for one in record.iterations if one.iteration in counted]
    return {
        "expected_ms": expected,
        "measured_ms": {kind: measured.get(kind, 0.0) for kind in expected},
        "measured_to_expected": sum(measured.values()) / sum(expected.values()),
        "iteration_expected_ms": float(period),
        "iteration_ms": median(times_ms),
    }


def filled(bench: Bench) -> dict[str, Any]:
    """With a job in the bubbles, in pairs of blocks."""
    bench.profiles()
    bench.check_time("filled")
    bench.trained("filled", bench.blocks.iterations, *bench.filling("filled"), *_paired(bench))
    found = of_run(bench.folder / "filled-run", bench.blocks)
    lacking = why_not() if bench.device == "cpu" else ""
    return found | ({"remark": f"{_NOT_EMULATED}: {lacking}"} if lacking else {})


def _paired(bench: Bench) -> list[str]:
    seconds = bench.options.baseline_seconds
    return ["--fill-paired-blocks", str(bench.options.block), *settings(baseline_seconds=seconds)]


def identity(bench: Bench) -> dict[str, Any]:
    """With jobs and without, as many iterations: whether weights and losses are the same to the bit."""
    bench.profiles()
    bench.check_time("identity")
    blocks = replace(bench.blocks, pairs=min(bench.options.pairs, _IDENTITY_PAIRS))
    lines = [
        bench.trained("identity", blocks.iterations, *bench.filling("identity")),
        bench.trained("identity-without", blocks.iterations),
    ]
    weights = [next(match[1] for line in one if (match := _WEIGHTS.search(line))) for one in lines]
    losses = [[match[1] for line in one if (match := _LOSS.search(line))] for one in lines]
    report = json.loads((bench.folder / "identity-run" / "report.json").read_text(encoding="utf-8"))
    check_steps(report, blocks)
    return {
        "iterations": blocks.iterations,
        "steps": report["total"]["steps"],
        "weights_identical": weights[0] == weights[1],
        "losses_compared": len(losses[1]),
        "losses_as_printed_identical": losses[0] == losses[1] if losses[1] else None,  # the last stage's only
    }


def no_gate(bench: Bench) -> dict[str, Any]:
    """The same task beside the training whenever it likes, switched on and off in blocks."""
    plain = Blocks(bench.options.block, bench.options.pairs, bench.options.warmup)  # the task starts before it
    run, blocks = bench.run("no-gate"), replace(plain, warmup=WITHOUT_WAITS + plain.warmup)
    with (
        beside_the_training(bench.job(), bench.device, bench.folder, blocks) as switched,
        bench.begun("no-gate", plain.iterations, "--fill-report", str(run)) as lines,
    ):
        for line in lines:
            if match := ITERATION.search(line):
                switched(int(match[1]) + 1)
    marked = blocks.mark(iterations_of(run))
    return {"slowdown": slowdown_of(marked), "p99_slowdown": p99_slowdown(marked)}


def marks(bench: Bench) -> dict[str, Any]:
    """What watching costs without jobs: the median iteration with PipeFill on, and with its patches alone."""
    iterations = bench.options.warmup + _MARKS_ITERATIONS[bench.device]
    times: dict[str, float] = {}
    for name, flags in (("watched", ("--fill-report", str(bench.run("marks")))), ("patches_alone", ())):
        lines = bench.trained(f"marks-{name}", iterations, *flags, slow=False)
        times[name] = median(times_ms(lines)[WITHOUT_WAITS + bench.options.warmup :])
    return {f"{name}_ms": time_ms for name, time_ms in times.items()} | {
        "cost": times["watched"] / times["patches_alone"] - 1
    }


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "profile": profile,
    "bubbles": bubbles,
    "filled": filled,
    "identity": identity,
    "no-gate": no_gate,
    "marks": marks,
}
