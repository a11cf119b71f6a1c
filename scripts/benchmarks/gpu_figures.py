"""The figures of bench_gpu.py's trainings: from their records, reports and output."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.fill.records.segment import last_segment
from megatron.fill.types import Bubble, BubbleUse, RankRecord
from scripts.benchmarks.trainings import Blocks, iterations_of, p99_slowdown

ITERATION = re.compile(r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")


def per_iteration_ms(found: Sequence[Bubble], counted: set[int]) -> dict[str, float]:
    """Of so many iterations, by kind."""
    sums: dict[str, float] = {}
    for one in found:
        if one.iteration in counted:
            sums[one.kind] = sums.get(one.kind, 0.0) + (one.end_ns - one.start_ns) / 1e6
    return {kind: total / len(counted) for kind, total in sums.items()}


def of_run(run: Path, blocks: Blocks) -> dict[str, Any]:
    """Figures of a training with jobs, in pairs of blocks; with ``failed`` where jobs had not settled before these.

    Raises:
        RuntimeError: no job ran a step.
    """
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    check_steps(report, blocks)
    found = {name: report["summary"][name] for name in ("slowdown", "harvest_ratio", "fill_efficiency")}
    found |= {name: report["summary"][name] for name in ("open_to_step_us", "overrun_us", "brakes")}
    segment = last_segment(run)
    records = list(segment.records())
    uses = [use for files in segment.files().values() for _, worker in files.attempts() for use in worker.uses]
    fillable_s = report["total"]["fillable_s"] + report["total"]["settling_s"]  # all uses are in it
    free = [one.free_bytes for record in records for one in record.bubbles if one.free_bytes]
    iterations = iterations_of(run)
    lengths = {
        on: per_iteration_ms(
            [one for one in records[0].bubbles if one.filling is on],
            {one.iteration for one in iterations if one.block >= 0 and one.filling is on and one.watched},
        )
        for on in (True, False)
    }
    shares = harvest_in_blocks(run)
    if late := not_settled(shares):
        found["failed"] = late
    return (
        found
        | {name: its[0] for name, its in shares.items()}
        | {
            "p99_slowdown": p99_slowdown(iterations),
            "overrun_share": sum(use.overrun_ns for use in uses) / 1e9 / fillable_s if fillable_s else None,
            "steps": report["total"]["steps"],
            "bubbles_ms_with": lengths[True],
            "bubbles_ms_without": lengths[False],
            "least_free_bytes": min(free, default=None),
            "iteration_ms": fmean(one.end_ns - one.start_ns for one in iterations if one.block >= 0) / 1e6,
        }
    )


def first_and_later(record: RankRecord, uses: Sequence[BubbleUse]) -> dict[str, Any]:
    """The share of bubble time inside steps in the first block with filling, and in all later ones.

    Were they not alike, jobs would have set themselves up in what is measured.  None: no bubble opened to jobs.
    """
    harvested_ns: defaultdict[int, int] = defaultdict(int)  # by bubble
    for use in uses:
        harvested_ns[use.seq] += use.harvested_ns
    blocks = {one.iteration: one.block for one in record.iterations if one.block >= 0 and one.filling}
    first = min(blocks.values(), default=-1)
    shares: list[float | None] = []
    for wanted in (lambda block: block == first, lambda block: block > first):
        its = [one for one in record.bubbles if one.filling and wanted(blocks.get(one.iteration, -1))]
        bubble_ns = sum(one.end_ns - one.start_ns for one in its)
        opened = bubble_ns and any(one.seq for one in its)
        shares.append(sum(harvested_ns[one.seq] for one in its if one.seq) / bubble_ns if opened else None)
    return {"first_block_harvest": shares[0], "later_blocks_harvest": shares[1]}


def harvest_in_blocks(run: Path) -> dict[str, list[float | None]]:
    """``first_and_later`` of a run's ranks, in their order."""
    segment = last_segment(run)
    files = segment.files()
    found: defaultdict[str, list[float | None]] = defaultdict(list)
    for record in sorted(segment.records(), key=lambda one: one.info.rank):
        uses = [use for _, worker in files[record.info.rank].attempts() for use in worker.uses]
        for name, share in first_and_later(record, uses).items():
            found[name].append(share)
    return dict(found)


def not_settled(shares: Mapping[str, Sequence[float | None]]) -> str:
    """The reason why jobs had set up in the blocks; empty if each rank with an open bubble had steps from the first on.

    Args:
        shares: as ``harvest_in_blocks`` returns them.
    """
    pairs = list(zip(shares["first_block_harvest"], shares["later_blocks_harvest"], strict=True))
    if all(first is None and later is None for first, later in pairs):
        return "no bubble opened to jobs in a block with filling"
    late = [rank for rank, both in enumerate(pairs) if both != (None, None) and not both[0]]
    if not late:
        return ""
    return f"no step in the first block with filling on rank {', '.join(map(str, late))}: the jobs had not settled"


def check_steps(report: dict[str, Any], blocks: Blocks) -> None:
    """Figures of a run in which nothing was filled would be taken for those of filling."""
    if not report["total"]["steps"]:
        said = "; ".join(f"{job['name']} is {job['state']}: {job['reason']}" for job in report["jobs"])
        raise RuntimeError(
            f"no job ran a step: {blocks.iterations} iterations may be too few (--startup-seconds); {said}"
        )


def times_ms(lines: Sequence[str]) -> list[float]:
    """Of all iterations of a training that printed these."""
    return [float(match[2]) for line in lines if (match := ITERATION.search(line))]
