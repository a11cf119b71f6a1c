"""How long the report of a large run takes, and how much memory.

Writes the records of a made-up run: 1F1B, every pass drawn with 5% of noise, a job on every rank that steps in every
bubble of a millisecond or more.  The data-parallel replicas of a stage have the same figures.  Then `pipefill report`
is run on it, in a process of its own.

    python scripts/benchmarks/bench_report.py --json docs/benchmarks/report.json
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.schedule import Pass
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.pipeline.timeline import Compiled, Timeline
from megatron.fill.records.agent import AgentFile
from megatron.fill.records.rank import RankWriter, rank_file
from megatron.fill.records.segment import SegmentEnding, begin_segment
from megatron.fill.report import REPORT, TIMELINE, TRACE
from megatron.fill.status import Cause, Status
from megatron.fill.types import (
    Bubble,
    BubbleUse,
    CycleKey,
    Iteration,
    JobRecord,
    JobState,
    RankInfo,
    RankRecord,
    Span,
    WorkerRecord,
    fills_block,
)
from scripts.benchmarks.harness import arguments, pipefill, write_figures

MS = 1_000_000
FORWARD_NS, NOISE, STEP_NS, LATENCY_NS = 10 * MS, 0.05, 2 * MS, MS // 10
WARMUP, BLOCK = 10, 5
KEPT_USES, KEPT_STEPS = 65_536, 8_192  # as many as a step log keeps
ANY = 987_654_321  # stands for a rank's number
NODE = 8  # ranks


def timelines(stages: int, microbatches: int, iterations: int) -> list[Timeline]:
    """One for each iteration."""
    draw = random.Random(0)
    schedule = make_schedule("1f1b", stages, microbatches)
    costs = PipelineCosts((StageCost(0, 0),) * stages, MS // 10, (MS,) * stages, (3 * MS,) * stages)
    compiled = Compiled(schedule)

    def takes(kind: Pass) -> int:
        return int(FORWARD_NS * (1 if kind is Pass.FORWARD else 2) * draw.gauss(1, NOISE))

    return [compiled.run(costs, [[takes(op.kind) for op in row] for row in schedule.order]) for _ in range(iterations)]


def of_stage(stage: int, played: list[Timeline]) -> tuple[RankRecord, JobRecord, WorkerRecord]:
    """What a rank of this stage and its agent would have written."""
    schedule = played[0].schedule
    iterations, bubbles, spans = [], [], []
    uses, steps = [], list[tuple[int, int]]()
    seq, harvested_ns, begin = 0, 0, 10**15
    for number, timeline in enumerate(played, 1):
        block = (number - 1 - WARMUP) // BLOCK if number > WARMUP else -1
        filling = fills_block(block)
        for index, (kind, start, end) in enumerate(timeline.waits[stage]):
            used = filling and end - start >= MS
            seq += used
            place = (number, index, kind, begin + start, begin + end)
            bubbles.append(Bubble(*place, end - start + MS // 2, seq * used, 8 << 30, filling))
            if used:
                its = [
                    (begin + at, begin + at + STEP_NS) for at in range(start + LATENCY_NS, end - STEP_NS + 1, STEP_NS)
                ]
                steps += its
                harvested_ns += len(its) * STEP_NS
                uses.append(BubbleUse(seq, LATENCY_NS, len(its) * STEP_NS, 0, len(its), its[-1][1] if its else 0))
        for op, start, end in timeline.spans[stage]:
            name = "forward" if op.kind is Pass.FORWARD else "backward"
            spans.append(Span(name, number, begin + start, begin + end))
        iterations.append(Iteration(number, begin, begin + timeline.period_ns, filling, block))
        begin += timeline.period_ns
    info = RankInfo(ANY, 0, 0, 0, 0, 0, stage, schedule.stages)
    key = CycleKey(schedule.name, schedule.microbatches)
    name, work = f"job-{ANY}", float(len(steps))
    status = Status(JobState.QUEUED, Cause.TRAINING_ENDED)
    job = JobRecord(name, "m:C", status, work, "steps", ANY, len(steps))
    worker = WorkerRecord(
        name, ANY, len(steps), work, harvested_ns, 10 * STEP_NS, 10.0, uses[-KEPT_USES:], steps[-KEPT_STEPS:]
    )
    return RankRecord(info, iterations, bubbles, spans, schedule=key), job, worker


def write_run(run_dir: Path, ranks: int, stages: int, microbatches: int, iterations: int) -> dict[str, int]:
    """Write the records; how many there are of what, and their bytes."""
    opened = begin_segment(run_dir, "a made-up run", ranks)
    folder = opened.segment.folder
    played = timelines(stages, microbatches, iterations)
    bubbles = 0
    for stage in range(stages):
        record, job, worker = of_stage(stage, played)
        bubbles += len(record.bubbles) * (ranks // stages)
        seen, did = rank_file(folder, ANY), folder / f"agent{ANY}.jsonl"
        RankWriter(seen, record.info, most_bytes=sys.maxsize).close(record, 60.0)
        AgentFile(folder, ANY).add(job, worker)
        first, rest = seen.read_bytes().split(b"\n", 1)
        said = did.read_bytes()
        for replica in range(ranks // stages):
            rank = replica * stages + stage
            place = replace(record.info, rank=rank, world_size=ranks, node=rank // NODE, data_parallel_rank=replica)
            head = json.dumps({**json.loads(first), "info": asdict(place)}).encode()
            rank_file(folder, rank).write_bytes(head + b"\n" + rest)
            (folder / f"agent{rank}.jsonl").write_bytes(said.replace(str(ANY).encode(), str(rank).encode()))
        seen.unlink()
        did.unlink()
    opened.end(SegmentEnding.WELL)
    return {"bubbles": bubbles, "bytes": sum(path.stat().st_size for path in folder.iterdir())}


def report(run_dir: Path) -> dict[str, Any]:
    """Run the command; seconds, CPU seconds and peak memory."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    printed = pipefill("report", str(run_dir))
    seconds, after = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "peak_bytes": after.ru_maxrss * 1024,
        "printed_lines": printed.count("\n"),
        "file_bytes": {name: (run_dir / name).stat().st_size for name in (REPORT, TRACE, TIMELINE)},
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="leave the made-up run in this new folder")
    parser.add_argument("--ranks", type=int, default=1024, help="(default: 1024)")
    parser.add_argument("--stages", type=int, default=16, help="(default: 16)")
    parser.add_argument("--microbatches", type=int, default=16, help="(default: 16)")
    parser.add_argument("--iterations", type=int, default=200, help="(default: 200)")
    options = parser.parse_args()
    if options.ranks % options.stages:
        parser.error(f"--ranks is {options.ranks}; expected a multiple of the {options.stages} stages")
    size = (options.ranks, options.stages, options.microbatches, options.iterations)
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = options.keep or Path(scratch) / "run"
        made = write_run(run_dir, *size)
        print(f"{size[0]} ranks, {made['bubbles']:,} bubbles, {made['bytes'] / 1e6:.0f} MB of records", flush=True)
        measured = report(run_dir)
    summary = {
        "ranks": size[0],
        "iterations": size[3],
        "bubbles": made["bubbles"],
        "seconds": measured["seconds"],
        "cpu_seconds": measured["cpu_seconds"],
        "peak_mib": round(measured["peak_bytes"] / 2**20),
        "load_15_minutes": round(os.getloadavg()[2], 1),
    }
    write_figures(options.json, summary, records=made, report=measured)


if __name__ == "__main__":
    main()
