"""What filling costs the main job, and what it gains.

Trains a small GPT with two pipeline stages on two cores (or two CUDA devices, where there are any) and measures, in
pairs of blocks within one run each, on the CPU as it is:

* ``filled``: the slowdown, harvest ratio and fill efficiency with two side tasks (digits training and PageRank);
* ``identity``: whether the losses of every iteration are bit-identical to the same run without jobs, and to the same
  run with no patch but the CPU backend; and ``startup_s``, how much longer the warm-up takes the main job with jobs
  than without, since they start in it (three trainings, of four pairs at most).

A CPU takes a core back from an idle-class process at any instant, so that these figures say little of a GPU, which does
not.  Therefore also on an emulated device that does not preempt (``scripts.benchmarks.emulated``, which takes the
right to real-time priorities), where steps run to completion (``emulated``) or take turns with the main job
(``slices``):

* ``emulated``, ``slices``: with everything;
* ``slices-free``: the same as ``slices``, with a main job that needs no turn while it waits (--fill-free-waits).

There ``harvest_ratio`` is the share of bubble time inside steps, ``device_harvest`` the steps' CPU time over it, both
from the end of the warm-up on, with the time in which jobs set themselves up (``no_job_share``);
``first_block_harvest`` and ``later_blocks_harvest``, of each rank, are of the blocks alone.  ``--step-ms`` has steps of
a given length in the place of the two tasks.  A part is one training but for ``identity``.
What the file of --json has of other parts is kept.

    python scripts/benchmarks/bench_main.py --parts filled --json docs/benchmarks/main.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from scripts.benchmarks.emulated import Emulation, emulation, why_not
from scripts.benchmarks.gpu_figures import harvest_in_blocks
from scripts.benchmarks.harness import Results, arguments, opened
from scripts.benchmarks.sidetasks import JOBS, tasks_of
from scripts.benchmarks.trainings import (
    GPT,
    Blocks,
    filled,
    identical,
    iterations_of,
    jobs_file,
    losses,
    p99_slowdown,
    settings,
    train,
)

IDENTITY_PAIRS = 4
_SETTLING = 2  # pairs


def on_cpu(folder: Path, blocks: Blocks, step_ms: float | None) -> dict[str, Any]:
    report = filled(folder, "filled", jobs_file(folder / "jobs.yaml", JOBS), blocks, *settings(baseline_seconds=3))
    details = {name: report[name] for name in ("ranks", "total")}
    p99 = p99_slowdown(iterations_of(folder / "filled-run"))
    return report["summary"] | {"p99_slowdown": p99, "details": details}


def identity(folder: Path, blocks: Blocks, step_ms: float | None) -> dict[str, Any]:
    """The same training with jobs, without jobs, and without patches."""
    blocks = replace(blocks, pairs=min(blocks.pairs, IDENTITY_PAIRS))
    found = identical(folder, jobs_file(folder / "jobs.yaml", JOBS), blocks)
    upstream = ["--module", "pipefill_patches", "--only", "cpu_backend", "pretrain_gpt.py"]
    train(folder, "no-patches", blocks, upstream)
    return found | {"losses_identical_to_no_patches": losses(folder / "jobs") == losses(folder / "no-patches")}


def emulated(folder: Path, blocks: Blocks, step_ms: float | None, *, how: Emulation, name: str) -> dict[str, Any]:
    """With PipeFill on a device that does not preempt."""
    jobs = [
        {"name": f"job{number}", "task": "scripts.benchmarks.sidetasks:Metered", "args": {"task": task, "args": args}}
        for number, (task, args) in enumerate(tasks_of(step_ms))
    ]
    path = jobs_file(folder / f"{name}.yaml", jobs)
    # No brake: it would stop the worse ones before they are measured.
    main = replace(GPT, environment=emulation(how))
    report = filled(folder, name, path, blocks, "--fill-max-slowdown", "0", main=main)
    use = report["total"]["time_use_ns"]
    filled_s = report["total"]["fillable_s"] + report["total"]["settling_s"]  # jobs count from their start
    return {
        "slowdown": report["summary"]["slowdown"],
        "p99_slowdown": p99_slowdown(iterations_of(folder / f"{name}-run")),
        "watching": report["summary"]["watching"],
        "no_job_share": use["no_job"] / sum(use.values()),
        "harvest_ratio": report["summary"]["harvest_ratio"],
        **harvest_in_blocks(folder / f"{name}-run"),
        "device_harvest": sum(job["result"]["device_s"] for job in report["jobs"]) / filled_s,
    }


type Part = tuple[tuple[str, ...], Callable[[Path, Blocks, float | None], dict[str, Any]]]


PARTS: dict[str, Part] = {  # by name: where its figures are in the summary, and what measures them
    "filled": ((), on_cpu),
    "identity": ((), identity),
    "emulated": (("emulated",), partial(emulated, how=Emulation.COMPLETION, name="emulated")),
    "slices": (("emulated_slices",), partial(emulated, how=Emulation.SLICES, name="slices")),
    "slices-free": (("emulated_free_slices",), partial(emulated, how=Emulation.FREE_SLICES, name="slices-free")),
}
EMULATED = [name for name in PARTS if name.startswith(("emulated", "slices"))]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS), help="what to measure (default: all)"
    )
    parser.add_argument("--block", type=int, default=5, help="iterations per block (default: 5)")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of blocks, on and off (default: 12)")
    parser.add_argument("--warmup", type=int, default=15, help="iterations before the first block (default: 15)")
    parser.add_argument("--step-ms", type=float, metavar="MS", help="steps of so much CPU time, on the emulated device")
    parser.add_argument("--keep", metavar="DIR", help="keep logs and reports here")
    options = parser.parse_args()
    for flag in ("block", "pairs", "warmup"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag} is {getattr(options, flag)}: expected at least 1")
    if options.step_ms is not None:
        if not 0 < options.step_ms <= 1000:
            parser.error(f"--step-ms is {options.step_ms:g}: expected above 0, and 1000 at most")
        if others := [name for name in options.parts if name not in EMULATED]:
            parser.error(f"--step-ms is for the emulated device: expected none of --parts {' '.join(others)} with it")
    if (wanted := [name for name in options.parts if name in EMULATED]) and (why := why_not()):
        parser.error(f"--parts {' '.join(wanted)}: {why}")
    results = opened(parser, options.json)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # the jobs run as a user without rights
        bench(folder.resolve(), options, results)
    print(json.dumps(results.summary, indent=2))


def bench(folder: Path, options: argparse.Namespace, results: Results) -> None:
    """Measure the parts; each is written down as soon as it is known."""
    blocks = Blocks(options.block, options.pairs, options.warmup, _SETTLING)
    for name in options.parts:
        where, measure = PARTS[name]
        figures = measure(folder, blocks, options.step_ms)
        details = figures.pop("details", {})
        if options.step_ms is not None:
            name, where = f"{name} --step-ms {options.step_ms:g}", (f"steps_of_{options.step_ms:g}_ms", *where)
        results.add(name, figures, *where, **details)


if __name__ == "__main__":
    main()
