"""The idle time of trainings: the share of wall time that has a name, and the share of long idle time that is filled.

Trains the small GPT of the benchmarks on the CPU, with a side task for each rank, in eight ways (``--parts``):
``plain`` (1F1B, two stages), with ``saves`` and with ``evaluation`` every hundredth iteration, with a
``slow-loader``, with two replicas (``dp2``) and with their gradients reduced during the backward passes (``overlap``),
with two chunks per stage (``vpp``), and with Megatron's ``timers`` and their barriers.  The four ranks of two replicas
would share two cores, on which nothing is idle; they have a smaller model, and each pass sleeps for the rest of a
length (``own_device``), as their jobs do in steps.  ``paired`` is the plain one in pairs of blocks with and without
filling, for the slowdown, and ``paired-vpp`` that of two chunks.

* ``named_share``: compute and named idle time over the wall time, by training, all ranks together; the wall time is
  that of the process's clock.
* ``long_idle_filled``: seconds of jobs' steps in bubbles over all idle seconds, both in stretches of 1 ms or more, by
  training, from the first iteration on: also what PipeFill does not fill, such as saves, and what only the beginning
  of a training has: the warm-up, the jobs' start, and frequent probes of the brake.  So it grows with ``--iterations``.
* ``later_filled``: the same of bubbles alone, in the second half of the iterations.
* ``drain_filled``: the same of the drain bubbles alone, of ``dp2`` and ``overlap``.
* ``harvest_1f1b``, ``harvest_interleaved``: the harvest ratio of ``plain`` and of ``vpp``.
* ``slowdown``, ``slowdown_interleaved``: of ``paired`` and of ``paired-vpp``.

The details have ``time_use_ns``, where the bubble time that was not harvested went, and ``long_idle_s``, the long idle
time by cause (``idle_causes``), of which the shares are printed.

    python scripts/benchmarks/bench_idle.py --json docs/benchmarks/idle.json
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from megatron.fill.types import BubbleKind
from scripts.benchmarks.harness import arguments, check_above_zero, opened
from scripts.benchmarks.idle_causes import FILLED, causes, causes_in
from scripts.benchmarks.sidetasks import DEVICE_JOB, JOBS
from scripts.benchmarks.trainings import GPT, Blocks, MainJob, filled, jobs_file, settings, train

OFTEN = "100"  # iterations between two saves, or evaluations
_WARMUP = 5
_SMALL = (  # these flags come after the model's own
    *("--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64"),
)
_REPLICAS = ("dp2", "overlap")
_INTERLEAVED = ("--num-layers-per-virtual-pipeline-stage", "2")
_PAIRED: dict[str, tuple[str, tuple[str, ...]]] = {  # name of the slowdown, and flags
    "paired": ("slowdown", ()),
    "paired-vpp": ("slowdown_interleaved", _INTERLEAVED),
}


def trained(folder: Path, part: str, iterations: int) -> dict[str, Any]:
    """Train in one of the ways, with jobs, and return the report."""
    flags: dict[str, tuple[str, ...]] = {
        "plain": (),
        "saves": ("--save", str(folder / "checkpoints"), "--save-interval", OFTEN),
        "evaluation": ("--eval-iters", "4", "--eval-interval", OFTEN),
        "slow-loader": (),
        "dp2": _SMALL,
        "overlap": (*_SMALL, "--overlap-grad-reduce"),
        "vpp": _INTERLEAVED,
        "timers": ("--timing-log-level", "2"),
    }
    modules = {"slow-loader": "slow_loader", **dict.fromkeys(_REPLICAS, "own_device")}
    script = ("-m", f"scripts.benchmarks.{modules[part]}", *GPT.script) if part in modules else GPT.script
    main = MainJob(script, ranks=4 if part in _REPLICAS else 2)
    run = folder / f"{part}-run"
    every = [DEVICE_JOB | {"name": f"device{rank}"} for rank in range(main.ranks)] if part in _REPLICAS else JOBS
    jobs = ("--fill-jobs", str(jobs_file(folder / f"{part}-jobs.yaml", every)), "--fill-report", str(run))
    blocks = Blocks(iterations - _WARMUP, 0, iterations)
    extra = (*jobs, *settings(warmup_iterations=_WARMUP), *flags[part])
    train(folder, part, blocks, main.script, *extra, main=main)
    return json.loads((run / "report.json").read_text(encoding="utf-8"))


def figures(report: dict[str, Any], run: Path) -> dict[str, Any]:
    """Return the figures of one training, and its account.

    Args:
        run: its run folder.
    """
    whole = report["account"][-1]
    long_s = causes(run)
    return {
        "named_share": whole["named_share"],
        "long_idle_filled": _filled(long_s),
        "long_idle_s": long_s,
        "harvest_ratio": report["summary"]["harvest_ratio"],
        "account": {one["name"]: one["time_s"] for one in whole["times"]},
        "time_use_ns": report["total"]["time_use_ns"],
    }


def _filled(by_cause_s: dict[str, float]) -> float:
    """Return the share of long idle time that jobs filled."""
    return by_cause_s.get(FILLED, 0.0) / sum(by_cause_s.values())


def shares(long_s: dict[str, float]) -> list[str]:
    """Return a line for each cause of at least 0.1% of the long idle time."""
    whole_s = sum(long_s.values())
    return [f"{name:16} {s / whole_s:6.1%}" for name, s in long_s.items() if s >= whole_s / 1000]


def main() -> None:
    parts = ("plain", "saves", "evaluation", "slow-loader", *_REPLICAS, "vpp", "timers", *_PAIRED)
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument(
        "--iterations", type=int, default=600, help="of each training but the paired ones (default: 600)"
    )
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks of 10 iterations (default: 20)")
    options = parser.parse_args()
    check_above_zero(parser, options, "iterations", "pairs")
    results = opened(parser, options.json)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for part in options.parts:
            if part in _PAIRED:
                name, flags = _PAIRED[part]
                blocks = Blocks(10, options.pairs, _WARMUP, settling=2)
                report = filled(folder, part, jobs_file(folder / "jobs.yaml", JOBS), blocks, *flags)
                results.add(part, {name: report["summary"]["slowdown"]}, **figures(report, folder / f"{part}-run"))
                continue
            run = folder / f"{part}-run"
            found = figures(trained(folder, part, options.iterations), run)
            print(part, *shares(found["long_idle_s"]), sep="\n  ", flush=True)
            found["later_s"] = causes_in(run, start=options.iterations // 2)
            found["later_filled"] = _filled(found["later_s"])
            if part in _REPLICAS:
                found["drain_s"] = causes_in(run, BubbleKind.DRAIN)
                found["drain_filled"] = _filled(found["drain_s"])
            for name in ("named_share", "long_idle_filled", "later_filled", "drain_filled"):
                if name in found:
                    results.add(part, {part: found[name]}, name, **found)
            harvests = {"plain": "harvest_1f1b", "vpp": "harvest_interleaved"}
            if part in harvests:
                results.add(part, {harvests[part]: found["harvest_ratio"]}, **found)
    print(json.dumps(results.summary, indent=2))


if __name__ == "__main__":
    main()
