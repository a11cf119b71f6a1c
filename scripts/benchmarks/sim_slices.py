"""What to expect of a GPU whose rank waits in a spinning receive: a simulation, to be compared with measurements.

For each way of waiting and sharing (scripts/benchmarks/studies/sliced.py), length of a step, and guard: the harvest in
GPU work (the work that steps did in bubbles over the bubbles' time) and the harvest ratio as a host's clock has it, by
how much later filled bubbles end, and how much longer iterations take. Each row is compared with the same iterations
without a worker. The lengths of slices, transfers, steps and waits are assumptions.

    python scripts/benchmarks/sim_slices.py --json docs/benchmarks/slices.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.fill.rank.rule import FillRule
from scripts.benchmarks.studies.sliced import RankWaits, SlicedSharing, SlicedWorker, play

GUARDS_MS = (0.0, 1.0, 2.0, 3.0, 5.0)
ITERATIONS, STAGES = 300, 4


def row(waits: RankWaits, step_ms: float, sharing: SlicedSharing, guard_ms: float, slice_ms: float) -> dict[str, Any]:
    """One setting, against the same iterations without a worker."""
    rule = FillRule(guard_ns=int(guard_ms * 1e6), stages=STAGES)
    filled, empty = (play(waits, one, sharing, rule, slice_ms, ITERATIONS) for one in (SlicedWorker(step_ms), None))
    late = np.asarray(filled.late or [0.0])
    return {
        "sharing": sharing.value,
        "slice_ms": slice_ms,
        "step_ms": step_ms,
        "guard_ms": guard_ms,
        "harvest_gpu": filled.worked / filled.bubbles,
        "harvest_host": filled.busy / filled.bubbles,
        "late_p50_ms": float(np.percentile(late, 50)),
        "late_p99_ms": float(np.percentile(late, 99)),
        "slowdown": filled.took / empty.took - 1,
    }


def study(
    waits: RankWaits, steps_ms: Sequence[float], slices_ms: Sequence[float], guards_ms: Sequence[float]
) -> list[dict[str, Any]]:
    """A row per setting; how long a slice is matters under time-slicing only."""
    return [
        row(waits, step, sharing, guard, slice_ms)
        for sharing in SlicedSharing
        for slice_ms in (slices_ms if sharing is not SlicedSharing.SIDE_BY_SIDE else slices_ms[:1])
        for step in steps_ms
        for guard in guards_ms
    ]


def print_study(rows: Sequence[dict[str, Any]]) -> None:
    print("A simulation. Harvest in GPU work and by the host's clock; by how many ms bubbles")
    print("end later; how much longer iterations take. Slices, steps, guards in ms.")
    titles = ("sharing", "slice", "step", "guard", "GPU", "host", "late p50", "p99", "slowdown")
    print("{:<13}{:>6}{:>6}{:>7}{:>7}{:>7}{:>10}{:>7}{:>10}".format(*titles))
    for one in rows:
        print(
            f"{one['sharing']:<13}{one['slice_ms']:>6g}{one['step_ms']:>6g}{one['guard_ms']:>7g}{one['harvest_gpu']:>7.2f}"
            f"{one['harvest_host']:>7.2f}{one['late_p50_ms']:>10.2f}{one['late_p99_ms']:>7.2f}{one['slowdown']:>10.2%}"
        )


def main() -> None:
    usual = RankWaits()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps-ms", type=float, nargs="+", default=[1.0, 3.0, 6.0], help="lengths of steps")
    parser.add_argument("--slices-ms", type=float, nargs="+", default=[2.0], help="lengths of time slices")
    parser.add_argument("--guards-ms", type=float, nargs="+", default=GUARDS_MS, help="kept free at a bubble's end")
    parser.add_argument("--transfer-ms", type=float, default=usual.transfer, help="of the GPU, for a receive")
    parser.add_argument("--noise-ms", type=float, default=usual.noise, help="deviation of the waits' lengths")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    options = parser.parse_args()
    if min(*options.steps_ms, *options.slices_ms, options.transfer_ms) <= 0:
        parser.error("expected steps, slices and a transfer above 0 ms")
    if min(*options.guards_ms, options.noise_ms) < 0:
        parser.error("expected neither guards nor noise below 0 ms")
    waits = RankWaits(transfer=options.transfer_ms, noise=options.noise_ms)
    rows = study(waits, options.steps_ms, options.slices_ms, options.guards_ms)
    print_study(rows)
    if options.json:
        content = {
            "command": " ".join(["python scripts/benchmarks/sim_slices.py", *sys.argv[1:]]),
            "simulated": True,
            "rows": rows,
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
