"""Language models in the bubbles of a training: tokens a second, and how far the evaluation of checkpoints lags."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.fill.folders import output_file
from megatron.fill.wings.llm.megatron import checkpoints
from scripts.benchmarks.bench_fill import step_efficiency
from scripts.benchmarks.llm.trained import prompts, write_corpus, write_requests
from scripts.benchmarks.trainings import (
    MODEL,
    Blocks,
    MainJob,
    command,
    filled,
    identical,
    jobs_file,
    settings,
    training,
)

BLOCKS = Blocks(length=5, pairs=5, warmup=60)
ALONE_S = 20
# A machine that others share is faster in one minute than in another, and a job is alone at the end of a run.
RUNS = 4
INTERVAL, SAVES = 30, 8
_EVALUATED = re.compile(r"^(\S+ \S+) INFO iteration (\d+): .* checkpoints behind$", re.MULTILINE)


def measure(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokens a second of a job with a draft on each rank, against it alone on its core; requests never end."""
    work = (folder / "bubbles").resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    requests = write_requests(work / "requests.jsonl", prompts(20_000), max_tokens=48, temperature=0)
    args = {
        "model": str((folder / "target").resolve()),
        "draft": [str((folder / "draft").resolve())],
        "requests": str(requests),
        "batch_sizes": [4],
        "chunks": [64],
    }
    jobs = [
        {"name": f"answers-{rank}", "task": "megatron.fill.wings.llm:BatchJob", "args": args, "memory": "2GiB"}
        for rank in range(2)
    ]
    path = jobs_file(work / "jobs.yaml", jobs)
    runs = []
    for number in range(RUNS):
        report = filled(work, f"jobs-{number}", path, BLOCKS, *settings(baseline_seconds=ALONE_S))
        figures = {name: report["summary"][name] for name in ("slowdown", "harvest_ratio", "fill_efficiency")}
        runs.append({"bubble_efficiency": step_efficiency(work / f"jobs-{number}-run"), **figures})
    known = [run["bubble_efficiency"] for run in runs if run["bubble_efficiency"] is not None]
    found = {"bubble_efficiency": fmean(known) if known else None, "bubbles": runs}
    return found, identical(work, path, Blocks(5, 2, 60))


def measure_lag(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint is evaluated while the next one is trained; after the last one training goes on for as long."""
    work, corpus = (folder / "lag").resolve(), write_corpus(folder)
    shutil.rmtree(work, ignore_errors=True)
    saved = work / "saved"
    saved.mkdir(parents=True)
    args = {"checkpoints": str(saved), "prompts": ["def "], "new_tokens": 32}
    job = {"name": "evaluate", "task": "megatron.fill.wings.llm:EvaluateCheckpoints", "args": args, "memory": "3GiB"}
    flags = ["--fill-jobs", str(jobs_file(work / "jobs.yaml", [job])), "--fill-report", str(work / "run")]
    flags += ["--fill-bind", str(work), str(corpus.parent), "--save", str(saved), "--save-interval", str(INTERVAL)]
    flags += ["--no-save-optim", "--data-path", str(corpus), "--split", "90,10,0", "--eval-iters", "4"]
    main = MainJob(flags=tuple(part.replace("--mock-data ", "").replace("255", "256") for part in MODEL))
    iterations = (SAVES + 1) * INTERVAL - 1
    with training(command(iterations, work / "tensorboard", ["pretrain_gpt.py"], *flags, main=main), work / "log"):
        pass
    report = json.loads((work / "run" / "report.json").read_text(encoding="utf-8"))
    behind = lags(saved, output_file(Path(report["jobs"][0]["directory"])).read_text(encoding="utf-8"))
    if set(behind) < {INTERVAL * (at + 1) for at in range(SAVES)}:
        raise RuntimeError(f"only the checkpoints of iterations {sorted(behind)} were evaluated; see {work}")
    share = report["summary"]["bubble_share"]
    return {"evaluation_lag": max(behind.values()), "evaluation_bubble_share": share}, {"behind": behind}


def lags(saved: Path, output: str) -> dict[int, int]:
    """For each iteration that was evaluated, how many newer checkpoints there were when it was done."""
    written = {at: max(file.stat().st_mtime for file in path.iterdir()) for at, path in checkpoints(saved).items()}
    found = {}
    for time, iteration in _EVALUATED.findall(output):
        done_s = datetime.strptime(time, "%Y-%m-%d %H:%M:%S,%f").timestamp()
        found[int(iteration)] = sum(at > int(iteration) and when_s < done_s for at, when_s in written.items())
    return found
