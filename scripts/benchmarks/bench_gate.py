"""How fast does the gate hand a bubble over, how much of it is used, and how much later does the main job go on?

Injects bubbles of known length into a gate, with a real worker loop and a CPU step of fixed length behind it, and
reports per bubble length: the harvest (time inside steps / bubble time), the latency from opening the gate to the
first step, the overrun of the last step, and by how much later the main job, which sleeps on the same core, gets it
back.  Both sides read CLOCK_MONOTONIC.

Measured in turn on the CPU as it is, where the kernel takes the core back from a step at any instant, and on an
emulated device that does not preempt (``scripts.benchmarks.emulated``; it takes the right to real-time priorities):
with the end of the bubble known to the worker, and with steps until the bubble closes.  ``--step-ms`` says how long a
step is, which is what cannot be interrupted there.

    python scripts/benchmarks/bench_gate.py --bubbles 100 --json docs/benchmarks/gate-emulated.json
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.fill.linux import host
from megatron.fill.pages.gate import SharedGate, SharedGateReader
from megatron.fill.pages.steplog import StepLog, create_log
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.worker.loop import StepLoop
from megatron.fill.worker.pacing import StepDevice, StepPages
from scripts.benchmarks.emulated import Emulation, Launches, why_not
from scripts.benchmarks.harness import arguments, write_figures
from scripts.benchmarks.sidetasks import CpuStep

_FAR_NS = 10**12
_MOST_MS = 10_000.0


@dataclass(frozen=True, slots=True)
class Way:
    """A device, and whether the worker knows when a bubble will end."""

    name: str
    emulation: Emulation | None
    predicted: bool


WAYS = (
    Way("CPU as it is", None, True),
    Way("to completion", Emulation.COMPLETION, True),
    Way("to completion, until closed", Emulation.COMPLETION, False),
    Way("slices", Emulation.SLICES, True),
    Way("slices, until closed", Emulation.SLICES, False),
)


def work(gate_fd: int, log_fd: int, core: int, step_ms: float, launches: Launches | None) -> None:
    """The worker: the runtime's own loop, on the rank's core, at idle priority."""
    host.yield_to_main_job([core])
    machine = TaskMachine(CpuStep(), TaskContext("bench", Path("/")))
    machine.create({"step_ms": step_ms})
    machine.init()
    device = StepDevice(preemptive=True) if launches is None else StepDevice(launches.launch, land=launches.land)
    StepLoop(machine, StepPages(SharedGateReader(gate_fd), StepLog(log_fd)), lambda: False, device).run()


def start(gate_fd: int, log_fd: int, core: int, step_ms: float, how: Emulation | None) -> list[int]:
    """A worker, and what makes the core a device that does not preempt; their processes."""
    launches = None if how is None else Launches(how)
    worker = os.fork()
    if worker == 0:
        work(gate_fd, log_fd, core, step_ms, launches)
        os._exit(0)
    if launches is None or launches.turns is None:
        return [worker]
    server = os.fork()
    if server == 0:
        gate = SharedGateReader(gate_fd)
        launches.turns.serve(worker, [core], lambda: gate.ended, lambda: not gate.shut)
        os._exit(0)
    return [worker, server]


def inject(way: Way, bubble_ms: float, count: int, gap_ms: float, step_ms: float, core: int) -> dict[str, Any]:
    """Inject ``count`` bubbles into a fresh gate and worker; the first ten only teach the worker its step time."""
    gate, log_fd = SharedGate(), create_log()
    children = start(gate.reader_fd(), log_fd, core, step_ms, way.emulation)
    time.sleep(0.5)
    bubble_ns = int(bubble_ms * 1e6)
    warmup = 10
    seqs: dict[int, int] = {}
    late_ns = []
    for number in range(warmup + count):
        end_ns = time.monotonic_ns() + bubble_ns
        seq = gate.open(end_ns if way.predicted else end_ns + _FAR_NS, 0)
        time.sleep(max(0, end_ns - time.monotonic_ns()) / 1e9)
        now_ns = time.monotonic_ns()
        gate.close(now_ns)
        if number >= warmup:
            seqs[seq] = now_ns - end_ns + bubble_ns
            late_ns.append(now_ns - end_ns)
        busy_until = time.monotonic() + gap_ms / 1e3
        while time.monotonic() < busy_until:  # the main job computes between its bubbles
            pass
    gate.end()
    for child in children:
        os.waitpid(child, 0)
    record = StepLog(log_fd).record("bench", 0)
    uses = [use for use in record.uses if use.seq in seqs]
    latency = [use.latency_ns / 1e3 for use in uses if use.latency_ns >= 0]
    overrun = [use.overrun_ns / 1e3 for use in uses if use.steps]
    return {
        "way": way.name,
        "bubble_ms": bubble_ms,
        "step_ms": step_ms,
        "bubbles": count,
        "used": len([use for use in uses if use.steps]),
        "harvest": sum(use.harvested_ns for use in uses) / sum(seqs.values()),
        "device_harvest": sum(use.steps for use in uses) * step_ms * 1e6 / sum(seqs.values()),
        "latency_us": _percentiles(latency),
        "overrun_us": _percentiles(overrun),
        "late_us": _percentiles([value / 1e3 for value in late_ns]),
        "slowdown": sum(late_ns) / (count * (bubble_ns + gap_ms * 1e6)),
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1), "max": round(max(values), 1)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--bubbles", type=int, default=200, help="bubbles of each length (default: 200)")
    parser.add_argument("--lengths-ms", type=float, nargs="+", default=[100.0, 20.0, 5.0])
    parser.add_argument("--gap-ms", type=float, default=100.0, help="between bubbles (default: 100)")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[2.4], help="CPU time of a step (default: 2.4)")
    options = parser.parse_args()
    if options.bubbles < 1:
        parser.error(f"--bubbles is {options.bubbles}: expected at least 1")
    for flag in ("lengths_ms", "gap_ms", "step_ms"):
        given = getattr(options, flag)
        for value in given if isinstance(given, list) else [given]:
            if not 0 < value <= _MOST_MS:
                parser.error(f"--{flag.replace('_', '-')} is {value:g}: expected above 0, and {_MOST_MS:g} at most")
    why = why_not()
    if why:
        print(f"only the CPU as it is: {why}", file=sys.stderr)
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    rows = [
        inject(way, length, options.bubbles, options.gap_ms, step_ms, core)
        for step_ms in options.step_ms
        for length in options.lengths_ms
        for way in WAYS
        if not (why and way.emulation)
    ]
    line = "{:<27}{:>5}{:>5}{:>8}{:>8}{:>7}{:>10}{:>10}"
    print(line.format("", "ms", "step", "used", "harvest", "device", "first ms", "late ms"))
    for row in rows:
        found = (row["latency_us"], row["late_us"])
        spans = [f"{span['p50'] / 1e3:.2g}/{span['p99'] / 1e3:.2g}" if span else "-" for span in found]
        shares = [f"{row[name]:.3f}" for name in ("harvest", "device_harvest")]
        lengths = [f"{row[name]:g}" for name in ("bubble_ms", "step_ms")]
        print(line.format(row["way"], *lengths, f"{row['used']}/{row['bubbles']}", *shares, *spans))
    print("harvest: share of the bubbles inside steps; device: CPU time of the steps over that of the bubbles;")
    print("first (opening to first step) and late (the main job goes on): median/99th percentile")
    write_figures(options.json, summary(rows), lengths=rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that count, by device and length of the bubbles and steps."""
    found: dict[str, Any] = {}
    for row in rows:
        found.setdefault(row["way"], {})[f"{row['bubble_ms']:g} ms, steps of {row['step_ms']:g}"] = {
            "harvest": round(row["harvest"], 4),
            "device_harvest": round(row["device_harvest"], 4),
            "slowdown": round(row["slowdown"], 5),
            "latency_p50_us": row["latency_us"].get("p50"),
            "late_p50_us": row["late_us"].get("p50"),
            "late_p99_us": row["late_us"].get("p99"),
        }
    return found


if __name__ == "__main__":
    main()
