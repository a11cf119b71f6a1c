"""Tokens a second in the bubbles of a training, against the same job alone on the same core."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.benchmarks.bench_fill import step_efficiency
from scripts.benchmarks.llm.trained import prompts, write_requests
from scripts.benchmarks.trainings import Blocks, filled, identical, jobs_file, settings

BLOCKS = Blocks(length=5, pairs=5, warmup=60)
ALONE_S = 20
# A machine that others share is faster in one minute than in another, and a job is alone at the end of a run.
RUNS = 4


def measure(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A job with a draft on each rank; more requests than either can answer."""
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
