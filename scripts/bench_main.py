"""What filling costs the main job, what it gains, and what the simpler ways would cost.

Trains a small GPT with two pipeline stages on two cores (or two CUDA devices, where there are any) and measures, in
pairs of blocks within one run each:

* the slowdown, harvest ratio and fill efficiency with two side tasks (digits training and PageRank);
* whether the losses of every iteration are bit-identical to the same run without jobs, and to the same run with no
  patch but the CPU backend;
* the slowdown of two things one would try instead: running the tasks beside the training, as they are and at the
  lowest priority of the operating system.

    python scripts/bench_main.py --json docs/benchmarks/main.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.fill.records import last_segment
from megatron.fill.report import paired_slowdown
from megatron.fill.sidetask.base import SideTask, TaskContext
from megatron.fill.sidetask.loader import load_task
from megatron.fill.types import Iteration

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


def filled(folder: Path, blocks: int, pairs: int, warmup: int) -> dict[str, Any]:
    """Train with the side tasks in paired blocks; the run's report."""
    jobs = folder / "jobs.yaml"
    entries = [{"name": name, "task": task, "args": args} for name, (task, args) in TASKS.items()]
    jobs.write_text(json.dumps({"jobs": entries}), encoding="utf-8")  # JSON is YAML
    flags = ["--fill-jobs", str(jobs), "--fill-report", str(folder / "run"), "--fill-paired-blocks", str(blocks)]
    flags += ["--fill-warmup-iterations", str(warmup), "--fill-baseline-seconds", "3"]
    arguments = command(warmup + 2 * blocks * pairs, folder / "filled", ["pretrain_gpt.py"], *flags)
    with training(arguments, folder / "filled.log"):
        pass
    return json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))


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
                    on = _block(int(seen[1]) + 1, blocks, warmup) % 2 == 0
                    for worker in workers:
                        worker.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
                    if int(seen[1]) == iterations:
                        break
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    measured = next(last_segment(run_dir).records()).iterations
    marked = []
    for one in measured:
        block = _block(one.iteration, blocks, warmup)
        marked.append(Iteration(one.iteration, one.start_ns, one.end_ns, block % 2 == 0, block))
    slowdown = paired_slowdown(marked)
    assert slowdown is not None
    return {"mean": slowdown.mean, "ci95": list(slowdown.ci95), "pairs": slowdown.pairs}


def _block(iteration: int, blocks: int, warmup: int) -> int:
    """The block of an iteration (from 1), as the runtime counts them; -1 in the warm-up."""
    return (iteration - 1 - warmup) // blocks if iteration > warmup else -1


def drive(name: str, core: int, idle: bool) -> None:
    """Run a side task for ever, with nothing between it and the core."""
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
        while True:
            task.run_next_step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--block", type=int, default=5, help="iterations per block (default: 5)")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of blocks, on and off (default: 12)")
    parser.add_argument("--baseline-pairs", type=int, default=4, help="pairs for each baseline (default: 4; 0: none)")
    parser.add_argument("--warmup", type=int, default=15, help="iterations before the first block (default: 15)")
    parser.add_argument("--skip-identity", action="store_true", help="do not repeat the run to compare losses")
    parser.add_argument("--keep", metavar="DIR", help="keep logs and reports here")
    parser.add_argument("--drive", choices=sorted(TASKS), help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--idle", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(options.drive, options.core, options.idle)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        result = bench(folder.resolve(), options)
    print(json.dumps(result["summary"], indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def bench(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    report = filled(folder, options.block, options.pairs, options.warmup)
    summary = dict(report["summary"])
    if not options.skip_identity:
        iterations = options.warmup + 2 * options.block * options.pairs
        with_jobs = losses(folder / "filled")
        assert len(with_jobs) == iterations
        upstream = ["--module", "pipefill_patches", "--only", "cpu_backend", "pretrain_gpt.py"]
        summary["losses_identical_to_no_jobs"] = with_jobs == plain(folder, "no-jobs", iterations, ["pretrain_gpt.py"])
        summary["losses_identical_to_no_patches"] = with_jobs == plain(folder, "no-patches", iterations, upstream)
    if options.baseline_pairs:
        for name, idle in (("colocated", False), ("colocated_idle_priority", True)):
            summary[name] = colocated(folder, name, idle, options.block, options.baseline_pairs, options.warmup)
    command_line = "python scripts/bench_main.py " + " ".join(sys.argv[1:])
    return {"command": command_line, "summary": summary, "ranks": report["ranks"], "total": report["total"]}


if __name__ == "__main__":
    main()
