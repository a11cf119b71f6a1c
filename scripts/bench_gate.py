"""How fast does the gate hand a bubble over, and how much of it is used?

Injects bubbles of known length into a gate, with a real worker loop and a CPU step of fixed length behind it, and
reports per bubble length: the harvest (time inside steps / bubble time), the latency from opening the gate to the
first step, and the overrun of the last step.  Both sides read CLOCK_MONOTONIC.

    python scripts/bench_gate.py --json docs/benchmarks/gate.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron.fill.device import host
from megatron.fill.gate import SharedGate, SharedGateReader
from megatron.fill.runtime.loop import StepLoop
from megatron.fill.runtime.steplog import StepLog, create_log
from megatron.fill.sidetask.base import SideTask, TaskContext
from megatron.fill.sidetask.machine import TaskMachine


class CpuStep(SideTask):
    """A step that uses the CPU for ``step_ms`` of thread time."""

    def create(self, step_ms: float = 2.4) -> None:
        self._step_ns = int(step_ms * 1e6)

    def run_next_step(self) -> None:
        end_ns = time.thread_time_ns() + self._step_ns
        while time.thread_time_ns() < end_ns:
            pass


def work(gate_fd: int, log_fd: int, core: int, step_ms: float) -> None:
    """The worker: the runtime's own loop, on the rank's core, at idle priority."""
    host.yield_to_main_job([core])
    machine = TaskMachine(CpuStep(), TaskContext("bench", Path("/")))
    machine.create({"step_ms": step_ms})
    machine.init()
    StepLoop(machine, SharedGateReader(gate_fd), StepLog(log_fd), lambda: False).run()


def inject(bubble_ms: float, count: int, gap_ms: float, step_ms: float, core: int) -> dict[str, Any]:
    """Inject ``count`` bubbles into a fresh gate and worker; the first ten only teach the worker its step time."""
    gate, log_fd = SharedGate(), create_log()
    gate_fd = gate.reader_fd()
    child = os.fork()
    if child == 0:
        work(gate_fd, log_fd, core, step_ms)
        os._exit(0)
    time.sleep(0.5)
    bubble_ns = int(bubble_ms * 1e6)
    warmup = 10
    seqs: dict[int, int] = {}
    for number in range(warmup + count):
        start_ns = time.monotonic_ns()
        seq = gate.open(start_ns + bubble_ns, 0)
        time.sleep(max(0, start_ns + bubble_ns - time.monotonic_ns()) / 1e9)
        end_ns = time.monotonic_ns()
        gate.close(end_ns)
        if number >= warmup:
            seqs[seq] = end_ns - start_ns
        busy_until = time.monotonic() + gap_ms / 1e3
        while time.monotonic() < busy_until:  # the main job computes between its bubbles
            pass
    gate.end()
    os.waitpid(child, 0)
    record = StepLog(log_fd).record("bench", 0)
    uses = [use for use in record.uses if use.seq in seqs]
    latency = [use.latency_ns / 1e3 for use in uses if use.latency_ns >= 0]
    overrun = [use.overrun_ns / 1e3 for use in uses if use.steps]
    return {
        "bubble_ms": bubble_ms,
        "bubbles": count,
        "used": len([use for use in uses if use.steps]),
        "harvest": sum(use.harvested_ns for use in uses) / sum(seqs.values()),
        "latency_us": _percentiles(latency),
        "overrun_us": _percentiles(overrun),
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1), "max": round(max(values), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--bubbles", type=int, default=200, help="bubbles of each length (default: 200)")
    parser.add_argument("--lengths-ms", type=float, nargs="+", default=[100.0, 20.0, 5.0])
    parser.add_argument("--gap-ms", type=float, default=100.0, help="between bubbles (default: 100)")
    parser.add_argument("--step-ms", type=float, default=2.4, help="CPU time of a step (default: 2.4)")
    options = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    rows = [inject(length, options.bubbles, options.gap_ms, options.step_ms, core) for length in options.lengths_ms]
    print(f"{'bubble ms':>10} {'used':>9} {'harvest':>8} {'latency us p50 / p99':>22} {'overrun us p50 / p99':>22}")
    for row in rows:
        latency, overrun = row["latency_us"], row["overrun_us"]
        print(
            f"{row['bubble_ms']:>10g} {row['used']:>4}/{row['bubbles']} {row['harvest']:>8.3f} "
            f"{latency.get('p50', 0):>13.1f} / {latency.get('p99', 0):<6.1f} "
            f"{overrun.get('p50', 0):>13.1f} / {overrun.get('p99', 0):<6.1f}"
        )
    if options.json:
        summary = {f"harvest_{row['bubble_ms']:g}ms": row["harvest"] for row in rows}
        summary |= {f"latency_p50_us_{row['bubble_ms']:g}ms": row["latency_us"].get("p50") for row in rows}
        summary |= {f"latency_p99_us_{row['bubble_ms']:g}ms": row["latency_us"].get("p99") for row in rows}
        summary |= {f"overrun_p50_us_{row['bubble_ms']:g}ms": row["overrun_us"].get("p50") for row in rows}
        command = "python scripts/bench_gate.py " + " ".join(sys.argv[1:])
        Path(options.json).write_text(
            json.dumps({"command": command, "summary": summary, "lengths": rows}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
