"""What fill jobs of real size gain: a training job and an inference job, one in the bubbles of each stage.

Trains the GPT of bench_main.py on two cores. In the bubbles, one rank trains BERT-base on random text, the other embeds
texts with all-MiniLM-L6-v2; whole, one step of either takes longer than any bubble. Measured in pairs of blocks within
one run, on the CPU as it is (``cpu``) and on an emulated device that does not preempt (``emulated``, which takes the
right to real-time priorities; bench_main.py):

* ``slowdown``, ``p99_slowdown``: of the main job's iterations, and of their 99th percentile;
* ``harvest_ratio``: bubble time spent in steps;
* ``fill_efficiency``: the jobs' work per second of bubble, idle ends of bubbles included, against their work per second
  alone on the same core (the main job stands still for a while at the end);
* ``step_efficiency``: the same per second spent in steps: what the interruptions cost.

``identity`` makes two trainings of two pairs at most: whether the losses are bit-identical to those without jobs, and
``startup_s``, how much longer the warm-up takes the main job with jobs, which start and are split in it.  What the file
of --json has of other parts is kept.

The jobs are measured alone first (``profile``), which takes minutes; a folder of --keep that has that is used as it is.

    python scripts/benchmarks/bench_fill.py --parts profile --keep runs/fill --json docs/benchmarks/fill.json
    python scripts/benchmarks/bench_fill.py --parts cpu --keep runs/fill --json docs/benchmarks/fill.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.fill.records.segment import last_segment
from megatron.fill.types import Bubble, BubbleUse
from scripts.benchmarks.emulated import Emulation, emulation, why_not
from scripts.benchmarks.harness import Results, arguments, opened, pipefill
from scripts.benchmarks.trainings import (
    GPT,
    Blocks,
    MainJob,
    filled,
    identical,
    iterations_of,
    jobs_file,
    p99_slowdown,
    settings,
)

NOT_PREEMPTING = replace(GPT, environment=emulation(Emulation.COMPLETION))
PARTS = ("profile", "cpu", "emulated", "identity")
IDENTITY_PAIRS = 2
_SETTLING = 2  # pairs
TEXTS = 2000  # of about 1,000 characters: more than a run can embed


def write_texts(folder: Path) -> None:
    """Cut the sources of Python's standard library, which every machine has, into text files."""
    folder.mkdir(exist_ok=True)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = "".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)
    for number in range(TEXTS):
        (folder / f"{number:05}.txt").write_text(whole[1000 * number : 1000 * (number + 1)], encoding="utf-8")


def write_jobs(folder: Path) -> Path:
    write_texts(folder / "texts")
    jobs = [
        {
            "name": "bert-base",
            "task": "megatron.fill.sidetask.training:TrainingJob",
            "args": {
                "model": "bert-base",
                "batch_size": 8,
                "micro_batch_sizes": [2, 1],
                "steps": 100_000,
                "pieces": 96,
            },
        },
        {
            "name": "minilm",
            "task": "examples.tasks.embed:EmbedTexts",
            "args": {"folder": str(folder / "texts"), "batch_sizes": [8, 4], "pieces": 48},
        },
    ]
    return jobs_file(folder / "jobs.yaml", jobs)


def profiled(folder: Path, jobs: Path) -> dict[str, Any]:
    """Measure the jobs alone, into the store that the training will serve, unless that was done in this folder."""
    path = folder / "profiles.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    arguments = ["profile", str(jobs), "--device", "cpu", "--store", str(folder / "jobs.db"), "--json"]
    path.write_text(found := pipefill(*arguments), encoding="utf-8")
    return json.loads(found)


def step_efficiency(run_dir: Path) -> float | None:
    """Mean over the jobs, weighted by the seconds they had in steps."""
    weighted = seconds = 0.0
    for files in last_segment(run_dir).files().values():
        for _, worker in files.attempts():
            if worker.alone_work and worker.work_done:
                harvested_s = worker.harvested_ns / 1e9
                alone = worker.alone_work / worker.alone_ns * 1e9
                weighted += worker.work_done / alone
                seconds += harvested_s
    return weighted / seconds if seconds else None


def by_bubble(run_dir: Path) -> list[dict[str, Any]]:
    """Where the bubble time went: for each place in the cycle, means over the iterations with filling."""
    found: dict[tuple[int, int], list[tuple[Bubble, BubbleUse | None]]] = defaultdict(list)
    for files in last_segment(run_dir).files().values():
        record = files.record()
        assert record is not None
        uses = {use.seq: use for _, worker in files.attempts() for use in worker.uses}
        for bubble in record.bubbles:
            if bubble.filling:
                found[record.info.rank, bubble.index].append((bubble, uses.get(bubble.seq) if bubble.seq else None))
    return [
        {
            "rank": rank,
            "index": index,
            "kind": pairs[0][0].kind,
            "iterations": len(pairs),
            "duration_ms": fmean(bubble.duration_ns for bubble, _ in pairs) / 1e6,
            "predicted_ms": fmean(bubble.predicted_ns for bubble, _ in pairs) / 1e6,
            "opened": sum(bubble.seq > 0 for bubble, _ in pairs),
            "used": sum(use is not None and not use.idle for _, use in pairs),
            "harvested_ms": sum(use.harvested_ns for _, use in pairs if use) / len(pairs) / 1e6,
            "longest_overrun_ms": max((use.overrun_ns for _, use in pairs if use), default=0) / 1e6,
        }
        for (rank, index), pairs in sorted(found.items())
    ]


def measure(
    folder: Path, part: str, jobs: Path, options: argparse.Namespace, *flags: str, main: MainJob
) -> dict[str, Any]:
    """One training in pairs of blocks: its figures, and their details."""
    blocks = Blocks(options.block, options.pairs, options.warmup, _SETTLING)
    report = filled(folder, part, jobs, blocks, *settings(baseline_seconds=options.baseline_seconds), *flags, main=main)
    run = folder / f"{part}-run"
    summary = {name: report["summary"][name] for name in ("slowdown", "harvest_ratio", "fill_efficiency")}
    summary |= {
        "p99_slowdown": p99_slowdown(iterations_of(run)),
        "step_efficiency": step_efficiency(run),
        "longest_bubble_ms": max(bubble["p90_ms"] for rank in report["cycle"] for bubble in rank["training"]),
    }
    details = {
        "jobs": [{name: value for name, value in job.items() if name != "directory"} for job in report["jobs"]],
        "ranks": report["ranks"],
        "total": report["total"],
        "bubbles": by_bubble(run),
        "plans": {path.parent.name: path.read_text(encoding="utf-8") for path in run.glob("jobs/*/plan.txt")},
    }
    return {"summary": summary, "details": details}


def bench(folder: Path, options: argparse.Namespace, results: Results) -> None:
    """Measure the parts; each is written down as soon as it is known."""
    jobs = write_jobs(folder)
    profiles = profiled(folder, jobs)
    for part in options.parts:
        if part == "profile":
            shortest = {
                f"{name}_shortest_step_ms": min(sum(node["duration_ns"] for node in one["nodes"]) for one in found)
                / 1e6
                for name, found in profiles.items()
            }
            results.add(part, shortest, part)
            continue
        store = ("--fill-store", str(folder / f"{part}.db"))
        shutil.copy(folder / "jobs.db", store[1])  # with the profiles, and without the other parts' jobs
        if part == "identity":
            blocks = Blocks(options.block, min(options.pairs, IDENTITY_PAIRS), options.warmup)
            results.add(part, identical(folder, jobs, blocks, *store), part)
            continue
        # No brake there: it would stop the filling before it is measured.
        flags, main = ((), GPT) if part == "cpu" else (("--fill-max-slowdown", "0"), NOT_PREEMPTING)
        found = measure(folder, part, jobs, options, *store, *flags, main=main)
        results.add(part, found["summary"], part, **found["details"])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--block", type=int, default=5, help="iterations per block (default: 5)")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of blocks, on and off (default: 10)")
    parser.add_argument("--warmup", type=int, default=60, help="iterations before the first block (default: 60)")
    parser.add_argument("--baseline-seconds", type=float, default=20.0, help="the jobs alone, at the end (default: 20)")
    parser.add_argument("--keep", metavar="DIR", help="keep logs and reports here")
    options = parser.parse_args()
    for flag in ("block", "pairs", "warmup"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag} is {getattr(options, flag)}: expected at least 1")
    if not 0 <= options.baseline_seconds <= 600:
        parser.error(f"--baseline-seconds is {options.baseline_seconds:g}: expected 0 to 600")
    if "emulated" in options.parts and (why := why_not()):
        parser.error(f"--parts emulated: {why}")
    results = opened(parser, options.json)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        bench(folder.resolve(), options, results)
    print(json.dumps(results.summary, indent=2))


if __name__ == "__main__":
    main()
