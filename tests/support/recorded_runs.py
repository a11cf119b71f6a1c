"""Records of runs whose truth is known: made from simulated timelines."""

from __future__ import annotations

import random

from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.schedule import Pass, Schedule
from megatron.fill.pipeline.timeline import Compiled, Timeline
from megatron.fill.report.schema import CycleBubble
from megatron.fill.types import Bubble, BubbleKind, CycleKey, Iteration, RankInfo, RankRecord, Span

MS = 1_000_000
SYNC_NS, OUTSIDE_NS = MS // 2, MS // 4


def records(schedule: Schedule, timelines: list[Timeline], tails_ns: list[int]) -> list[RankRecord]:
    """What ranks that went through these iterations would have recorded.

    Every iteration ends with two collectives: the timeline's own, ``SYNC_NS`` after which each rank works for its
    ``tails_ns``, and another one.
    """
    made = []
    bubbles: list[list[Bubble]] = [[] for _ in range(schedule.stages)]
    spans: list[list[Span]] = [[] for _ in range(schedule.stages)]
    iterations: list[list[Iteration]] = [[] for _ in range(schedule.stages)]
    for rank in range(schedule.stages):
        info = RankInfo(rank, schedule.stages, rank, schedule.stages, 0, 1, rank, schedule.stages)
        key = CycleKey(schedule.name, schedule.microbatches, schedule.chunks)
        made.append(RankRecord(info, iterations[rank], bubbles[rank], spans[rank], schedule=key))
    begin = 5_000 * MS
    for number, timeline in enumerate(timelines, 1):
        met = begin + timeline.period_ns + SYNC_NS
        end = met + max(tails_ns) + SYNC_NS
        for rank in range(schedule.stages):
            waits = [(kind, begin + start, begin + stop) for kind, start, stop in timeline.waits[rank]]
            if waits and waits[-1][0] is BubbleKind.DRAIN and waits[-1][2] == begin + timeline.period_ns:
                waits[-1] = (BubbleKind.DRAIN, waits[-1][1], met)
            else:
                waits.append((BubbleKind.DRAIN, begin + timeline.period_ns, met))
            waits.append((BubbleKind.DRAIN, met + tails_ns[rank], end))
            bubbles[rank].extend(
                Bubble(number, index, kind, start, stop) for index, (kind, start, stop) in enumerate(waits)
            )
            spans[rank].extend(
                Span("forward" if op.kind is Pass.FORWARD else "backward", number, begin + start, begin + stop)
                for op, start, stop in timeline.spans[rank]
            )
            iterations[rank].append(Iteration(number, begin + OUTSIDE_NS, end, number % 2 == 0, (number - 1) // 2))
        begin = end
    return made


def cycle_bubble(
    kind: BubbleKind, free_bytes: int, index: int = 0, median_ms: float = 9, p10_ms: float = 1, mean_ms: float = 9
) -> CycleBubble:
    """One bubble of a cycle as a report has it."""
    return CycleBubble(
        index=index,
        kind=kind,
        mean_ms=mean_ms,
        median_ms=median_ms,
        p10_ms=p10_ms,
        p90_ms=9,
        offset_ms=0,
        share=0.1,
        free_bytes=free_bytes,
        count=3,
    )


def noisy(schedule: Schedule, count: int, seed: int, p2p_ns: int = MS // 5) -> list[Timeline]:
    draw = random.Random(seed)
    compiled = Compiled(schedule, rendezvous=True)
    timelines = []
    for _ in range(count):
        costs = PipelineCosts(
            (StageCost(0, 0),) * schedule.virtual_stages,
            p2p_ns,
            tuple(draw.randint(MS, 3 * MS) for _ in range(schedule.stages)),
            tuple(draw.randint(2 * MS, 5 * MS) for _ in range(schedule.stages)),
        )
        durations = [[draw.randint(8 * MS, 14 * MS) for _ in row] for row in schedule.order]
        timelines.append(compiled.run(costs, durations))
    return timelines
