"""What filling costs the main job, what it gains, and what the simpler ways would cost.

Trains a small GPT with two pipeline stages on two cores (or two CUDA devices, where there are any) and measures, in
pairs of blocks within one run each, on the CPU as it is:

* ``filled``: the slowdown, harvest ratio and fill efficiency with two side tasks (digits training and PageRank);
* ``identity``: whether the losses of every iteration are bit-identical to the same run without jobs, and to the same
  run with no patch but the CPU backend;
* ``colocated``: the slowdown of running the tasks beside the training instead, as they are and at the lowest priority
  of the operating system, both in a session of their own.

A CPU takes a core back from an idle-class process at any instant, so that these figures say little of a GPU, which does
not.  Therefore also, on two cores:

* ``emulated``: the same on a device that does not preempt (``--fill-emulate completion``, which takes the right to
  real-time priorities): with everything; with a gate but no prediction (``--fill-overrun 100``); without a gate; and,
  on the CPU as it is, the idle class in the rank's own session without a gate.

    python scripts/bench_main.py --json docs/benchmarks/main.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from megatron.fill.device import host
from megatron.fill.device.emulated import why_not
from megatron.fill.records import last_segment
from megatron.fill.report import paired_slowdown
from megatron.fill.sidetask.base import SideTask, TaskContext
from megatron.fill.sidetask.loader import load_task
from megatron.fill.types import Iteration, RankRecord, fills_block

PARTS = ("filled", "identity", "colocated", "emulated")
ROOT = Path(__file__).resolve().parents[1]
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("megatron.fill.sidetask.digits:DigitsTraining", {"epochs": 0}),
    "pagerank": ("megatron.fill.sidetask.graph:PageRank", {"repeat": 0}),
}
MODEL = (
    "--pipeline-model-parallel-size 2 --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 128",
    "--max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant",
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 0 --eval-interval 100000",
    "--log-interval 1 --tensorboard-log-interval 1",
)


def command(iterations: int, log_dir: Path, script: list[str], *extra: str) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    return [
        *launcher,
        *script,
        *" ".join(MODEL).split(),
        "--train-iters",
        str(iterations),
        "--tensorboard-dir",
        str(log_dir),
        *extra,
    ]


@contextmanager
def training(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
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
        env=os.environ | {"OMP_NUM_THREADS": "1"},
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


def losses(log_dir: Path) -> dict[int, float]:
    """The loss of every iteration as TensorBoard has it: float32, to the bit."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(log_dir), size_guidance={"scalars": 0})
    events.Reload()
    return {event.step: event.value for event in events.Scalars("lm loss")}


def filled(folder: Path, name: str, blocks: int, pairs: int, warmup: int, *extra: str) -> dict[str, Any]:
    """Train with the side tasks in paired blocks; the run's report."""
    jobs, run = folder / "jobs.yaml", folder / f"{name}-run"
    entries = [{"name": name, "task": task, "args": args} for name, (task, args) in TASKS.items()]
    jobs.write_text(json.dumps({"jobs": entries}), encoding="utf-8")  # JSON is YAML
    flags = ["--fill-jobs", str(jobs), "--fill-report", str(run), "--fill-paired-blocks", str(blocks)]
    flags += ["--fill-warmup-iterations", str(warmup), "--fill-baseline-seconds", "3", *extra]
    arguments = command(warmup + 2 * blocks * pairs, folder / name, ["pretrain_gpt.py"], *flags)
    with training(arguments, folder / f"{name}.log"):
        pass
    return json.loads((run / "report.json").read_text(encoding="utf-8"))


def plain(folder: Path, name: str, iterations: int, script: list[str]) -> dict[int, float]:
    """Train without jobs; the losses."""
    with training(command(iterations, folder / name, script), folder / f"{name}.log"):
        pass
    return losses(folder / name)


def colocated(folder: Path, name: str, idle: bool, blocks: int, pairs: int, warmup: int) -> dict[str, Any]:
    """Train while the same tasks run beside it, ungated, continued and stopped in blocks; the slowdown."""
    run_dir = folder / name
    iterations = warmup + 2 * blocks * pairs
    arguments = command(iterations, folder / f"{name}-tb", ["pretrain_gpt.py"], "--fill-report", str(run_dir))
    cores = sorted(os.sched_getaffinity(0))[:2]
    workers = [
        subprocess.Popen([sys.executable, __file__, "--drive", task, "--core", str(core), *["--idle"] * idle])
        for task, core in zip(TASKS, cores, strict=True)
    ]
    time.sleep(10)  # until they are set up
    try:
        for worker in workers:
            worker.send_signal(signal.SIGSTOP)
        with training(arguments, folder / f"{name}.log") as process:
            assert process.stdout is not None
            for line in process.stdout:
                seen = re.search(r"iteration +(\d+)/", line)
                if seen:
                    on = fills_block(_block(int(seen[1]) + 1, blocks, warmup))
                    for worker in workers:
                        worker.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
                    if int(seen[1]) == iterations:
                        break
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return slowdown_of(marked(next(last_segment(run_dir).records()), blocks, warmup))


def marked(record: RankRecord, blocks: int, warmup: int) -> list[Iteration]:
    """The iterations of a run that knew of no blocks."""
    found = []
    for one in record.iterations:
        block = _block(one.iteration, blocks, warmup)
        found.append(Iteration(one.iteration, one.start_ns, one.end_ns, fills_block(block), block))
    return found


def slowdown_of(iterations: list[Iteration]) -> dict[str, Any]:
    slowdown = paired_slowdown(iterations)
    assert slowdown is not None
    return {"mean": slowdown.mean, "ci95": list(slowdown.ci95), "pairs": slowdown.pairs}


def beside(folder: Path, name: str, mode: str, blocks: int, pairs: int, warmup: int) -> dict[str, Any]:
    """Train while each rank's own session has a task on the rank's core, ungated, in blocks.

    Args:
        mode: ``idle`` for the idle class of the CPU as it is, ``emulated`` for steps that cannot be interrupted.
    """
    run_dir, switch = folder / f"{name}-run", folder / f"{name}-switch"
    switch.write_bytes(b"\0")
    iterations = warmup + 2 * blocks * pairs
    script = [__file__, "--beside", mode, str(switch)]
    with training(
        command(iterations, folder / name, script, "--fill-report", str(run_dir)), folder / f"{name}.log"
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            seen = re.search(r"iteration +(\d+)/", line)
            if seen:
                switch.write_bytes(bytes([fills_block(_block(int(seen[1]) + 1, blocks, warmup))]))
    records = list(last_segment(run_dir).records())
    iterations_by_rank = [marked(record, blocks, warmup) for record in records]
    inside_ns = bubbles_ns = 0
    for record, timed in zip(records, iterations_by_rank, strict=True):
        steps = np.fromfile(f"{switch}-{record.info.rank}", dtype=np.int64).reshape(-1, 2)
        on = {one.iteration for one in timed if one.filling}
        for bubble in record.bubbles:
            if bubble.iteration in on:
                start_ns, end_ns = bubble.start_ns, bubble.end_ns
                bubbles_ns += end_ns - start_ns
                overlap = np.minimum(steps[:, 1], end_ns) - np.maximum(steps[:, 0], start_ns)
                inside_ns += int(overlap.clip(min=0).sum())
    return {
        "slowdown": slowdown_of(iterations_by_rank[0]),
        "p99_slowdown": p99_slowdown(iterations_by_rank[0]),
        "harvest_ratio": inside_ns / bubbles_ns,
    }


def p99_slowdown(iterations: Sequence[Iteration]) -> float:
    """How much longer the 99th percentile of a rank's iterations is in the blocks with filling."""
    times = {
        on: [one.end_ns - one.start_ns for one in iterations if one.block >= 0 and one.filling is on]
        for on in (True, False)
    }
    return float(np.percentile(times[True], 99) / np.percentile(times[False], 99)) - 1


def rank_with_task(mode: str, switch: Path, script: list[str]) -> None:
    """One rank of a training, with a task in a process beside it, in its session."""
    rank = int(os.environ["LOCAL_RANK"])
    parent = os.getpid()
    if os.fork() == 0:
        host.die_with_parent(parent)
        core = sorted(os.sched_getaffinity(0))[rank]
        run_beside(list(TASKS)[rank % len(TASKS)], core, mode, switch, Path(f"{switch}-{rank}"))
    sys.argv = [str(ROOT / "pretrain_gpt.py"), *script]
    sys.path.insert(0, str(ROOT))
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_beside(name: str, core: int, mode: str, switch: Path, log: Path) -> NoReturn:
    """Run a task's steps while the switch is on, and write down when each began and ended."""
    with started(name, core, idle=True) as task, switch.open("rb") as word, log.open("ab", buffering=0) as steps:
        while True:
            if os.pread(word.fileno(), 1, 0) != b"\1":
                time.sleep(0.001)
                continue
            start_ns = time.monotonic_ns()
            if mode == "emulated":
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            task.run_next_step()
            if mode == "emulated":
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            steps.write(struct.pack("qq", start_ns, time.monotonic_ns()))


def _block(iteration: int, blocks: int, warmup: int) -> int:
    """The block of an iteration (from 1), as the runtime counts them; -1 in the warm-up."""
    return (iteration - 1 - warmup) // blocks if iteration > warmup else -1


@contextmanager
def started(name: str, core: int, idle: bool) -> Iterator[SideTask]:
    """A side task in this process, with nothing between it and the core."""
    os.sched_setaffinity(0, {core})
    if idle:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    path, args = TASKS[name]
    task: SideTask = load_task(path)
    with tempfile.TemporaryDirectory() as directory:
        task.context = TaskContext(name, Path(directory))
        task.create(**args)
        task.init()
        task.start()
        yield task


def drive(name: str, core: int, idle: bool) -> None:
    """Run a side task's steps for ever."""
    with started(name, core, idle) as task:
        while True:
            task.run_next_step()


def main() -> None:
    if sys.argv[1:2] == ["--beside"]:
        rank_with_task(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default: all)")
    parser.add_argument("--block", type=int, default=5, help="iterations per block (default: 5)")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of blocks, on and off (default: 12)")
    parser.add_argument("--baseline-pairs", type=int, default=4, help="pairs for each baseline (default: 4)")
    parser.add_argument("--warmup", type=int, default=15, help="iterations before the first block (default: 15)")
    parser.add_argument("--keep", metavar="DIR", help="keep logs and reports here")
    parser.add_argument("--drive", choices=sorted(TASKS), help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--idle", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(options.drive, options.core, options.idle)
    for flag in ("block", "pairs", "baseline_pairs", "warmup"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} is {getattr(options, flag)}: expected at least 1")
    if "emulated" in options.parts and (why := why_not()):
        parser.error(f"--parts emulated: {why}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # the jobs run as a user without rights
        result = bench(folder.resolve(), options)
    print(json.dumps(result["summary"], indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def bench(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    parts, block, warmup = options.parts, options.block, options.warmup
    result: dict[str, Any] = {"command": "python scripts/bench_main.py " + " ".join(sys.argv[1:]), "summary": {}}
    summary = result["summary"]
    if "filled" in parts or "identity" in parts:
        report = filled(folder, "filled", block, options.pairs, warmup)
        summary |= report["summary"]
        result |= {name: report[name] for name in ("ranks", "total")}
    if "identity" in parts:
        iterations = warmup + 2 * block * options.pairs
        with_jobs = losses(folder / "filled")
        assert len(with_jobs) == iterations
        upstream = ["--module", "pipefill_patches", "--only", "cpu_backend", "pretrain_gpt.py"]
        summary["losses_identical_to_no_jobs"] = with_jobs == plain(folder, "no-jobs", iterations, ["pretrain_gpt.py"])
        summary["losses_identical_to_no_patches"] = with_jobs == plain(folder, "no-patches", iterations, upstream)
    if "colocated" in parts:
        for name, idle in (("colocated", False), ("colocated_idle_priority", True)):
            summary[name] = colocated(folder, name, idle, block, options.baseline_pairs, warmup)
    if "emulated" in parts:
        summary["emulated"] = emulated(folder, options)
    return result


def emulated(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """On a device that does not preempt: with everything, and with less of it."""
    block, warmup, baseline = options.block, options.warmup, options.baseline_pairs

    def gated(name: str, pairs: int, *extra: str) -> dict[str, Any]:
        # No brake: it would stop the worse ones before they are measured.
        flags = ("--fill-emulate", "completion", "--fill-max-slowdown", "0", *extra)
        report = filled(folder, name, block, pairs, warmup, *flags)
        first = next(last_segment(folder / f"{name}-run").records())
        return {
            "slowdown": report["summary"]["slowdown"],
            "p99_slowdown": p99_slowdown(first.iterations),
            "harvest_ratio": report["summary"]["harvest_ratio"],
        }

    ours = gated("emulated", options.pairs)
    return ours | {
        "baselines": {
            "no_gate": beside(folder, "no-gate", "emulated", block, baseline, warmup),
            "idle_in_session": beside(folder, "idle-in-session", "idle", block, baseline, warmup),
            "gate_without_prediction": gated("no-prediction", baseline, "--fill-overrun", "100"),
        }
    }


if __name__ == "__main__":
    main()
