"""Tokens a second in the bubbles of a training, against the same job alone on the same core."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from scripts.benchmarks.bench_fill import step_efficiency
from scripts.benchmarks.llm.trained import prompts, write_requests
from scripts.benchmarks.trainings import Blocks, filled, identical, jobs_file

BLOCKS = Blocks(length=5, pairs=20, warmup=60)
ALONE_S = 20


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
        {"name": f"answers-{rank}", "task": "megatron.fill.llm:BatchJob", "args": args, "memory": "2GiB"}
        for rank in range(2)
    ]
    path = jobs_file(work / "jobs.yaml", jobs)
    report = filled(work, "jobs", path, BLOCKS, "--fill-baseline-seconds", str(ALONE_S))
    summary = report["summary"]
    figures = {name: summary[name] for name in ("slowdown", "harvest_ratio", "fill_efficiency")}
    found = {"bubble_efficiency": step_efficiency(work / "jobs-run"), "bubbles": figures}
    return found, identical(work, path, Blocks(5, 2, 60))
