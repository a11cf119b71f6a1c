"""What the runtime makes of a plan in bubbles of seconds, as they are in large trainings: the simulator's ``harvest``.

A GPipe training of two stages and two micro-batches on two cores, whose passes take seconds; in the bubbles, one rank
trains BERT-base and the other embeds texts with all-MiniLM-L6-v2 (bench_fill.py). Per rank:

* planned: what the planner lays into the bubbles as they were on average, as a share of the bubble time;
* measured: the job's work per second of bubble, over its work per second alone on the same core at the end of the run;
* harvest: measured / planned. It has everything in it that a plan does not know: bubbles that end early, prediction
  with a margin, steps that vary, waking up, checkpoints, and the memory bandwidth that the other rank takes.

The steps cannot be interrupted, as on a GPU (emulate: completion, which takes the right to real-time priorities);
--preempting takes the CPU as it is, which takes its core back at any instant.

    python scripts/benchmarks/sim_harvest.py --json FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.device.emulated import why_not
from megatron.fill.planner.search import best_plan
from megatron.fill.planner.tail import packed_ns
from megatron.fill.profiles import BubbleCycle, BubbleSlot, JobProfile
from megatron.fill.records import last_segment
from megatron.fill.types import Bubble, JobRecord, RankRecord, WorkerRecord
from megatron.fill.wings.sim.values import RuntimeModel
from scripts.benchmarks.bench_fill import profiled, write_jobs
from scripts.benchmarks.trainings import command, settings, training

SHAPE = (
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 2 --global-batch-size 4 --fill-pipeline-schedule gpipe"
)
_ROOMY = 2**40  # bytes: memory is not what limits the plan here


def run(folder: Path, iterations: int, warmup: int, preempting: bool) -> dict[str, list[JobProfile]]:
    """Make the training; its records lie in ``folder / "run"``. Returns the jobs' profiles."""
    jobs = write_jobs(folder)
    found = profiled(folder, jobs)
    flags = ["--fill-jobs", str(jobs), "--fill-report", str(folder / "run"), "--fill-store", str(folder / "jobs.db")]
    flags += [*settings(warmup_iterations=warmup, baseline_seconds=20), "--fill-max-slowdown", "0"]
    flags += [] if preempting else settings(emulate="completion")
    arguments = command(warmup + iterations, folder / "log", ["pretrain_gpt.py"], *SHAPE.split(), *flags)
    with training(arguments, folder / "train.log"):
        pass
    return {name: [JobProfile.from_dict(one) for one in its] for name, its in found.items()}


def mean_cycle(record: RankRecord) -> BubbleCycle:
    """The bubbles of an iteration with filling, as they were on average."""
    by_index: defaultdict[int, list[Bubble]] = defaultdict(list)
    for bubble in record.bubbles:
        if bubble.filling and not bubble.forward_only and bubble.index >= 0:
            by_index[bubble.index].append(bubble)
    times = [item.end_ns - item.start_ns for item in record.iterations if item.filling]
    slots = [
        BubbleSlot(its[0].kind, round(sum(bubble.duration_ns for bubble in its) / len(times)), _ROOMY)
        for _, its in sorted(by_index.items())
    ]
    return BubbleCycle(round(fmean(times)), tuple(slots))


def harvest_of(record: RankRecord, job: JobRecord, worker: WorkerRecord, profiles: list[JobProfile]) -> dict[str, Any]:
    """Planned, measured, and the one over the other, of one rank.

    Raises:
        RuntimeError: the job did nothing, or was not measured alone.
    """
    if not (worker.alone_work and worker.work_done):
        done = f"did {worker.work_done:g} in bubbles and {worker.alone_work:g} alone"
        raise RuntimeError(f"rank {record.info.rank}: job {job.name} {done}, and is {job.state}: {job.reason}")
    cycle = mean_cycle(record)
    plan = best_plan(cycle, profiles, RuntimeModel().reserve_ns)
    profile = next(one for one in profiles if one.configuration == plan.configuration)
    planned = packed_ns(plan, profile) / cycle.bubble_ns
    fillable_ns = sum(bubble.duration_ns for bubble in record.bubbles if bubble.filling)
    measured = worker.work_done / fillable_ns / (worker.alone_work / worker.alone_ns)
    return {
        "rank": record.info.rank,
        "job": worker.job,
        "iteration_s": cycle.period_ns / 1e9,
        "bubbles_s": [slot.duration_ns / 1e9 for slot in cycle.slots],
        "fillable_s": fillable_ns / 1e9,
        "in_steps": worker.harvested_ns / fillable_ns,
        "planned": planned,
        "measured": measured,
        "harvest": measured / planned,
    }


def study(folder: Path, iterations: int, warmup: int, preempting: bool = False) -> dict[str, Any]:
    """Per rank, and over both, weighted by the bubble time of each."""
    profiles = run(folder, iterations, warmup, preempting)
    rows = []
    for files in last_segment(folder / "run").files().values():
        record = files.record()
        assert record is not None
        job, worker = max(files.attempts(), key=lambda its: its[1].harvested_ns)
        rows.append(harvest_of(record, job, worker, profiles[job.name]))
    weight = sum(row["fillable_s"] for row in rows)
    means = {
        name: sum(row[name] * row["fillable_s"] for row in rows) / weight
        for name in ("in_steps", "planned", "measured", "harvest")
    }
    return {"iterations": iterations, "preempting": preempting, "ranks": rows, **means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    parser.add_argument("--keep", metavar="DIR", help="keep the training's records here")
    parser.add_argument("--iterations", type=int, default=24, help="with filling (default: 24)")
    parser.add_argument("--warmup", type=int, default=10, help="iterations before (default: 10)")
    parser.add_argument("--preempting", action="store_true", help="on the CPU as it is")
    options = parser.parse_args()
    if not options.preempting and (why := why_not()):
        parser.error(f"{why}; --preempting does without")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found = study(folder, options.iterations, options.warmup, options.preempting)
    print(json.dumps(found, indent=2))
    if options.json:
        content = {"command": "python scripts/benchmarks/sim_harvest.py " + " ".join(sys.argv[1:]), **found}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
