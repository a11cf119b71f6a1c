"""What a run did, from its raw records to ``report.json``, a terminal, a trace and a picture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.fill.errors import FillError
from megatron.fill.records import read_agent, read_rank, write_text
from megatron.fill.report.build import build_report
from megatron.fill.report.cycle import bubble_cycle, write_cycles
from megatron.fill.report.schema import RankCycle, Report, Slowdown, Wall
from megatron.fill.report.slowdown import paired_slowdown
from megatron.fill.report.terminal import print_cycle, print_report
from megatron.fill.report.timeline import draw_timeline
from megatron.fill.report.trace import write_trace
from megatron.fill.types import JobRecord, RankRecord, WorkerRecord

__all__ = [
    "RankCycle",
    "Report",
    "Slowdown",
    "bubble_cycle",
    "build_report",
    "compose",
    "draw_timeline",
    "paired_slowdown",
    "print_cycle",
    "print_report",
    "profile",
    "write_cycles",
    "write_trace",
]


def compose(run_dir: Path, command: str, trace_iterations: int = 3, walls: Mapping[str, str] | None = None) -> Report:
    """Build the report of a run folder and write ``report.json``, ``trace.json`` and ``timeline.png`` into it.

    It reads ``ranks/rank*.json`` and, if there are any, ``agents/agent*.json``.

    Args:
        walls: the walls around jobs by name, and why one did not stand.

    Raises:
        FillError: if no rank left a record, or a record cannot be read.
    """
    ranks = _read_ranks(run_dir)
    workers: list[WorkerRecord] = []
    jobs: list[JobRecord] = []
    for path in _numbered(run_dir / "agents", "agent*.json"):
        its_workers, its_jobs = read_agent(path)
        workers += its_workers
        jobs += its_jobs
    built = build_report(ranks, workers, merge_attempts(jobs), command)
    report = built.model_copy(update={"walls": [Wall(name=name, lacks=why) for name, why in (walls or {}).items()]})
    write_text(run_dir / "report.json", report.model_dump_json(indent=2) + "\n")
    write_trace(run_dir / "trace.json", ranks, workers, trace_iterations)
    draw_timeline(run_dir / "timeline.png", ranks, workers, summary=report.summary)
    return report


def merge_attempts(jobs: Sequence[JobRecord]) -> list[JobRecord]:
    """One record per job: the last one's word, with the work of all its attempts in this run."""
    merged: dict[tuple[str, str], JobRecord] = {}
    for job in sorted(jobs, key=lambda job: job.ended_s):
        before = merged.get((job.name, job.directory))
        if before is not None:
            job = replace(
                job,
                work_done=before.work_done + job.work_done,
                steps=before.steps + job.steps,
                harvested_s=before.harvested_s + job.harvested_s,
            )
        merged[job.name, job.directory] = job
    return list(merged.values())


def profile(run_dir: Path) -> list[RankCycle]:
    """Write the bubble cycles of a run folder's ranks to ``bubbles.json`` in it.

    Raises:
        FillError: if no rank left a record, or a record cannot be read.
    """
    cycles = [bubble_cycle(record) for record in _read_ranks(run_dir)]
    write_cycles(run_dir / "bubbles.json", cycles)
    return cycles


def _read_ranks(run_dir: Path) -> list[RankRecord]:
    files = _numbered(run_dir / "ranks", "rank*.json")
    if not files:
        raise FillError(f"{run_dir / 'ranks'}: holds no rank*.json, so there is nothing to report")
    return [read_rank(path) for path in files]


def _numbered(folder: Path, pattern: str) -> list[Path]:
    """In the order of their numbers: rank10 after rank9."""

    def number(path: Path) -> tuple[int, str]:
        digits = re.search(r"\d+", path.stem)
        return int(digits[0]) if digits else -1, path.name

    return sorted(folder.glob(pattern), key=number)
