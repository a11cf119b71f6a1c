"""What fill jobs of real size gain: a training job and an inference job, one in the bubbles of each stage.

Trains the GPT of bench_main.py on two cores. In the bubbles, one rank trains BERT-base on random text, the other embeds
texts with all-MiniLM-L6-v2; whole, one step of either takes longer than any bubble. Measured in pairs of blocks within
one run:

* ``slowdown``: of the main job;
* ``harvest_ratio``: bubble time spent in steps;
* ``fill_efficiency``: the jobs' work per second of bubble, idle ends of bubbles included, against their work per second
  alone on the same core (the main job stands still for a while at the end);
* ``step_efficiency``: the same per second spent in steps: what the interruptions cost.

    python scripts/bench_fill.py --json docs/benchmarks/fill.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron.fill.records import last_segment
from megatron.fill.types import Bubble, BubbleUse
from scripts.bench_main import command, losses, plain, training

TEXTS = 2000  # of about 1,000 characters: more than a run can embed
PIPEFILL = [sys.executable, "-c", "from megatron.fill.cli import main; main()"]


def write_texts(folder: Path) -> None:
    """Cut the sources of Python's standard library, which every machine has, into text files."""
    folder.mkdir()
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
            "task": "megatron.fill.sidetask.embed:EmbedTexts",
            "args": {
                "folder": str(folder / "texts"),
                "output": str(folder / "embeddings.parquet"),
                "batch_sizes": [8, 4],
                "pieces": 48,
            },
        },
    ]
    path = folder / "jobs.yaml"
    path.write_text(json.dumps({"jobs": jobs}), encoding="utf-8")  # JSON is YAML
    return path


def profiled(folder: Path, jobs: Path) -> dict[str, Any]:
    """Measure the jobs alone, into the store that the training will serve."""
    arguments = ["profile", str(jobs), "--device", "cpu", "--store", str(folder / "jobs.db"), "--json"]
    done = subprocess.run([*PIPEFILL, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def filled(folder: Path, jobs: Path, options: argparse.Namespace) -> dict[str, Any]:
    flags = ["--fill-jobs", str(jobs), "--fill-report", str(folder / "run"), "--fill-store", str(folder / "jobs.db")]
    flags += ["--fill-paired-blocks", str(options.block), "--fill-warmup-iterations", str(options.warmup)]
    flags += ["--fill-baseline-seconds", str(options.baseline_seconds)]
    iterations = options.warmup + 2 * options.block * options.pairs
    with training(command(iterations, folder / "filled", ["pretrain_gpt.py"], *flags), folder / "filled.log"):
        pass
    return json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))


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


def bench(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    jobs = write_jobs(folder)
    profiles = profiled(folder, jobs)
    report = filled(folder, jobs, options)
    run = report["summary"]
    plans = {path.parent.name: path.read_text(encoding="utf-8") for path in (folder / "run").glob("jobs/*/plan.txt")}
    longest_ms = max(bubble["p90_ms"] for rank in report["cycle"] for bubble in rank["training"])
    slowdown = run["slowdown"]
    summary = {
        "harvest_ratio": run["harvest_ratio"],
        "fill_efficiency": run["fill_efficiency"],
        "step_efficiency": step_efficiency(folder / "run"),
        "slowdown": slowdown["mean"],
        "slowdown_low": slowdown["ci95"][0],
        "slowdown_high": slowdown["ci95"][1],
        "pairs": slowdown["pairs"],
        "longest_bubble_ms": longest_ms,
    }
    for name, found in profiles.items():
        shortest = min(sum(node["duration_ns"] for node in one["nodes"]) for one in found)
        summary[f"{name}_shortest_step_ms"] = shortest / 1e6
    if not options.skip_identity:
        iterations = options.warmup + 2 * options.block * options.pairs
        without = plain(folder, "no-jobs", iterations, ["pretrain_gpt.py"])
        summary["losses_identical_to_no_jobs"] = losses(folder / "filled") == without
    return {
        "command": "python scripts/bench_fill.py " + " ".join(sys.argv[1:]),
        "summary": summary,
        "jobs": [{name: value for name, value in job.items() if name != "directory"} for job in report["jobs"]],
        "ranks": report["ranks"],
        "total": report["total"],
        "bubbles": by_bubble(folder / "run"),
        "plans": plans,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--block", type=int, default=5, help="iterations per block (default: 5)")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of blocks, on and off (default: 12)")
    parser.add_argument("--warmup", type=int, default=60, help="iterations before the first block (default: 60)")
    parser.add_argument("--baseline-seconds", type=float, default=20.0, help="the jobs alone, at the end (default: 20)")
    parser.add_argument("--skip-identity", action="store_true", help="do not repeat the run to compare losses")
    parser.add_argument("--keep", metavar="DIR", help="keep logs and reports here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        result = bench(folder.resolve(), options)
    print(json.dumps(result["summary"], indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
