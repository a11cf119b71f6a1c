"""What a side task costs the rank on the next core: what no gate can prevent where cores share caches and memory.

A rank computes passes of bench_main.py's model on one core, without a bubble.  The runtime's worker loop is on another
core and steps while a gate is open, which it is in every other block of passes.  The slowdown in those blocks, times
the share of an iteration in which the bubbles of the other rank are filled, is what filling costs on such a machine
at least.  The task ``registers`` touches no memory; the others are the side tasks of bench_main.py.

    python scripts/benchmarks/bench_neighbour.py --json docs/benchmarks/neighbour.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.linux import host
from megatron.fill.pages.gate import SharedGate, SharedGateReader
from megatron.fill.pages.steplog import StepLog, create_log
from megatron.fill.report import paired_slowdown
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.sidetask.loader import load_task
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.types import Iteration
from megatron.fill.worker.loop import StepLoop
from megatron.fill.worker.pacing import StepPages
from scripts.benchmarks.sidetasks import TASKS as SIDE_TASKS

TASKS: dict[str, tuple[str, dict[str, Any]]] = {"registers": ("scripts.benchmarks.sidetasks:CpuStep", {}), **SIDE_TASKS}
DAY_NS = 86_400 * 10**9
WARM = 100  # steps before the first block


def stage() -> Callable[[], None]:
    """A forward and a backward pass of one stage of bench_main.py: 4 layers, hidden 512, 2 x 128 tokens."""
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, activation="gelu", batch_first=True)
    layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    tokens = torch.randn(2, 128, 512)

    def passes() -> None:
        layers(tokens).sum().backward()

    return passes


def work(gate_fd: int, log: StepLog, name: str, core: int, folder: Path) -> None:
    """The worker, as beside a real training."""
    host.yield_to_main_job([core])
    path, args = TASKS[name]
    machine = TaskMachine(load_task(path), TaskContext(name, folder))
    machine.create(args)
    machine.init()
    StepLoop(machine, StepPages(SharedGateReader(gate_fd), log), lambda: False).run()


def measure(name: str, cores: tuple[int, int], options: argparse.Namespace) -> dict[str, Any]:
    gate, log = SharedGate(), StepLog(create_log())
    gate_fd = gate.reader_fd()
    with TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            work(gate_fd, log, name, cores[1], Path(folder))
            os._exit(0)
        passes = stage()
        gate.open(time.monotonic_ns() + DAY_NS, 0)
        while log.step_count < WARM:
            passes()
            if os.waitpid(child, os.WNOHANG)[0]:
                sys.exit(f"bench_neighbour.py: the worker with {name} ended before {WARM} steps")
        gate.close(time.monotonic_ns())
        iterations: list[Iteration] = []
        for pair in range(options.pairs):
            order = random.sample([False, True], 2)
            for half, filling in enumerate(order):
                if filling:
                    gate.open(time.monotonic_ns() + DAY_NS, 0)
                for _ in range(options.block):
                    start_ns = time.monotonic_ns()
                    passes()
                    block = 2 * pair + half
                    iterations.append(Iteration(len(iterations), start_ns, time.monotonic_ns(), filling, block))
                if filling:
                    gate.close(time.monotonic_ns())
        gate.end()
        os.waitpid(child, 0)
    slowdown = paired_slowdown(iterations)
    assert slowdown is not None
    passes_ms = median(one.end_ns - one.start_ns for one in iterations if not one.filling) / 1e6
    return {"task": name, "passes_ms": passes_ms, "slowdown": slowdown.mean, "ci95": slowdown.ci95}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--block", type=int, default=1, help="passes per block (default: 1)")
    parser.add_argument("--pairs", type=int, default=120, help="pairs of blocks, on and off (default: 120)")
    options = parser.parse_args()
    for name in ("block", "pairs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: expected at least 1")
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        parser.error("needs two cores, this process may use one")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, cores[:1])
    rows = [measure(name, (cores[0], cores[1]), options) for name in TASKS]
    print(f"{'task':10} {'passes ms':>9} {'slowdown':>9}  95% interval")
    for row in rows:
        low, high = row["ci95"]
        print(f"{row['task']:10} {row['passes_ms']:>9.1f} {row['slowdown']:>+9.1%}  {low:+.1%} to {high:+.1%}")
    if options.json:
        result = {
            "command": " ".join(["python scripts/benchmarks/bench_neighbour.py", *sys.argv[1:]]),
            "summary": {row["task"]: row["slowdown"] for row in rows},
            "tasks": rows,
        }
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
