"""A small run made by hand: two stages, two microbatches, 1F1B, paired blocks, three workers.

An iteration takes 100 ms, and 101 ms with filling on.  A forward takes 10 ms, a backward 20 ms::

    ms        0   10   20      40   50  60   70      90  100
    stage 0   | F0 | F1 |fwd-bwd|   B0   |int|   B1   | opt |
    stage 1   |fill| F0 |   B0  | F1 |   B1   | drain | opt |

Iterations 1 and 2 are before the blocks; blocks of two follow, on and off in turn, to iteration 10.  After iteration
10, stage 1 evaluates twice, with a bubble of 10 ms each, filled.  A side-task step takes 4 ms and starts 0.1 ms after
its bubble; in the interior bubble a third step runs on by 2.1 ms.  The predictor expects 1 ms too much.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron.fill.records.segment import Segment, SegmentEnding
from megatron.fill.report import Report
from megatron.fill.report.build import Part, ReportBuilder
from megatron.fill.report.jobs import job_reports
from megatron.fill.status import Cause, Status
from megatron.fill.types import (
    Bubble,
    BubbleKind,
    BubbleUse,
    Iteration,
    JobRecord,
    JobState,
    Prices,
    RankInfo,
    RankRecord,
    Span,
    WorkerRecord,
)

MS = 1_000_000
START_NS = 7_000_000_000_000
LATENCY_NS = 100_000
STEP_NS = 4 * MS
WORK_PER_STEP = 8.0
LAST = 10

_BUBBLES = {  # per stage: kind, start, end, steps
    0: [(BubbleKind.FWD_BWD, 20, 40, 4), (BubbleKind.INTERIOR, 60, 70, 3)],
    1: [(BubbleKind.FILL, 0, 10, 2), (BubbleKind.DRAIN, 70, 90, 4)],
}
_SPANS = {
    0: [("forward", 0, 10), ("forward", 10, 20), ("backward", 40, 60), ("backward", 70, 90)],
    1: [("forward", 10, 20), ("backward", 20, 40), ("forward", 40, 50), ("backward", 50, 70)],
}


@dataclass
class _Worker:
    uses: list[BubbleUse] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)

    def fill(self, bubble: Bubble, steps: int) -> None:
        begin = bubble.start_ns + LATENCY_NS
        self.steps += [(begin + at * STEP_NS, begin + (at + 1) * STEP_NS) for at in range(steps)]
        end = begin + steps * STEP_NS
        harvested = min(end, bubble.end_ns) - begin
        self.uses.append(BubbleUse(bubble.seq, LATENCY_NS, harvested, max(end - bubble.end_ns, 0), steps, end))

    def record(self, job: str, rank: int, alone_ns: int = 0, alone_work: float = 0.0) -> WorkerRecord:
        return WorkerRecord(
            job=job,
            rank=rank,
            steps_done=len(self.steps),
            work_done=len(self.steps) * WORK_PER_STEP,
            harvested_ns=sum(use.harvested_ns for use in self.uses),
            alone_ns=alone_ns,
            alone_work=alone_work,
            uses=self.uses,
            steps=self.steps,
        )


def block_of(iteration: int) -> int:
    return (iteration - 3) // 2 if iteration >= 3 else -1


def is_filling(iteration: int) -> bool:
    return block_of(iteration) >= 0 and block_of(iteration) % 2 == 0


def synthetic_run() -> tuple[list[RankRecord], list[WorkerRecord], list[JobRecord]]:
    """The ranks' records, the workers' and the jobs'."""
    stages = {stage: _stage(stage) for stage in (0, 1)}
    ranks = [record for record, _ in stages.values()]
    train, (resize, graph) = stages[0][1][0], stages[1][1]
    workers = [
        train.record("train", 0, alone_ns=40 * MS, alone_work=100.0),
        resize.record("resize", 1),
        graph.record("graph", 1, alone_ns=50 * MS, alone_work=100.0),
    ]
    return ranks, workers, _jobs(workers)


def report_of(
    ranks: list[RankRecord],
    workers: list[WorkerRecord],
    jobs: list[JobRecord],
    command: str = "",
    prices: Prices | None = None,
) -> Report:
    """The report of a run of one segment that ended by itself."""
    builder = ReportBuilder()
    for record in sorted(ranks, key=lambda record: record.info.rank):
        builder.add([Part(1, record, [worker for worker in workers if worker.rank == record.info.rank])])
    segment = Segment(Path("records/1"), 1, command, 0.0, len(ranks), ending=SegmentEnding.WELL)
    return builder.report([segment], job_reports([segment], [(1, job) for job in jobs], lambda names: {}), prices)


def _stage(stage: int) -> tuple[RankRecord, list[_Worker]]:
    """Stage 0 has one worker; stage 1 has one up to iteration 5 and another from then on."""
    workers = [_Worker(), _Worker()]
    iterations, bubbles, spans = [], [], []
    at, seq = START_NS, 0
    for number in range(1, LAST + 1):
        filling = is_filling(number)
        end = at + (101 if filling else 100) * MS
        iterations.append(Iteration(number, at, end, filling, block_of(number)))
        spans += [Span(name, number, at + a * MS, at + b * MS) for name, a, b in _SPANS[stage]]
        for index, (kind, a, b, steps) in enumerate(_BUBBLES[stage]):
            seq += filling
            predicted = (b - a + 1) * MS if filling else 0
            bubble = Bubble(
                number, index, kind, at + a * MS, at + b * MS, predicted, seq * filling, (2 + index) << 30, filling
            )
            bubbles.append(bubble)
            if filling:
                workers[stage == 1 and number > 5].fill(bubble, steps)
        at = end
    for _ in range(2 if stage == 1 else 0):
        seq += 1
        bubble = Bubble(LAST, 0, BubbleKind.FILL, at, at + 10 * MS, 11 * MS, seq, 5 << 30, True, forward_only=True)
        bubbles.append(bubble)
        workers[1].fill(bubble, 2)
        at += 30 * MS
    info = RankInfo(
        rank=stage, world_size=2, local_rank=stage, local_world_size=2, node=0, nodes=1, stage=stage, stages=2
    )
    return RankRecord(info, iterations, bubbles, spans), workers


def _jobs(workers: list[WorkerRecord]) -> list[JobRecord]:
    train, resize, graph = workers
    ended = Status(JobState.QUEUED, Cause.TRAINING_ENDED)
    return [
        JobRecord(
            name="train",
            what="examples.tasks:Train",
            status=ended,
            work_done=train.work_done,
            unit="images",
            rank=0,
            steps=train.steps_done,
            harvested_s=train.harvested_ns / 1e9,
            total_work=10_000.0,
            result={"loss": 0.5},
            directory="jobs/train",
        ),
        JobRecord(
            name="resize",
            what="python resize.py [fast]",
            status=Status(JobState.SUCCEEDED, Cause.FINISHED),
            work_done=resize.work_done,
            unit="images",
            rank=1,
            steps=resize.steps_done,
            harvested_s=resize.harvested_ns / 1e9,
        ),
        JobRecord("graph", "examples.tasks:Graph", ended, graph.work_done, "edges", 1),
        JobRecord("late", "examples.tasks:Late", Status(JobState.QUEUED, Cause.NO_RANK_FREE), 0.0, "items"),
    ]
