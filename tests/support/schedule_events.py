"""Random schedules, and a discrete-event simulation that shares no code with the timeline."""

from __future__ import annotations

import heapq
import random

from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.schedule import Op, Pass, Schedule, ScheduleError
from megatron.fill.pipeline.timeline import Compiled


def random_case(seed: int) -> tuple[Schedule, PipelineCosts, list[list[int]]]:
    """A random valid order on a random placement, its costs, and a time for each pass; some passes form one action."""
    draw = random.Random(seed)
    ranks, chunks, microbatches = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 5)
    placement = list(range(ranks)) * chunks
    draw.shuffle(placement)
    stages, split = len(placement), draw.random()
    waiting: list[tuple[Pass, int, int]] = [(Pass.FORWARD, microbatch, 0) for microbatch in range(microbatches)]
    rows: list[list[Op]] = [[] for _ in range(ranks)]
    while waiting:
        kind, microbatch, stage = waiting.pop(draw.randrange(len(waiting)))
        rows[placement[stage]].append(Op(kind, microbatch, placement[:stage].count(placement[stage])))
        back = Pass.INPUT if draw.random() < split else Pass.BACKWARD
        if kind is Pass.FORWARD:
            waiting.append((kind, microbatch, stage + 1) if stage + 1 < stages else (back, microbatch, stage))
        elif kind is not Pass.WEIGHT and stage:
            waiting.append((back, microbatch, stage - 1))
        if kind is Pass.INPUT:
            waiting.append((Pass.WEIGHT, microbatch, stage))
    its = ("own", ranks, microbatches, chunks, tuple(map(tuple, rows)), tuple(placement))
    pairs = {(rank, at) for rank, row in enumerate(rows) for at in range(0, len(row) - 1, 2) if draw.random() < 0.2}
    try:
        schedule = Schedule(*its, frozenset(pairs))
    except ScheduleError:  # what goes out after both comes too late
        schedule = Schedule(*its)
    times = [tuple(draw.randint(0, 20) for _ in range(ranks)) for _ in range(2)]
    costs = PipelineCosts((StageCost(1, 1),) * stages, draw.choice([0, 0, 1, 7]), *times)
    return schedule, costs, [[draw.randint(0, 30) for _ in row] for row in rows]


def events(schedule: Schedule, costs: PipelineCosts, durations: list[list[int]]) -> list[list[tuple[int, int]]]:
    """The idle times of each rank, as start and end, by playing the iteration event by event."""
    placement, last = schedule.placement, len(schedule.placement) - 1
    left = [list(zip(row, times, strict=True)) for row, times in zip(schedule.order, durations, strict=True)]
    there = {("F", microbatch, 0) for microbatch in range(schedule.microbatches)}
    there |= {("B", microbatch, last) for microbatch in range(schedule.microbatches)}
    idle_since: dict[int, int] = {}
    idle: list[list[tuple[int, int]]] = [[] for _ in left]
    done = ("", -1, -1)  # the rank's own pass is over, rather than something arrived
    heap = [(costs.optimizer_ns[rank], rank, done) for rank in range(len(left))]
    heapq.heapify(heap)
    finished = [0] * len(left)
    busy = set(range(len(left)))
    sends: list[list[tuple[int, tuple[str, int, int]]]] = [[] for _ in left]  # what goes out at the action's end
    while heap:
        now, rank, arrived = heapq.heappop(heap)
        if arrived != done:
            there.add(arrived)
        else:
            busy.remove(rank)
            idle_since[rank] = now
        if rank in busy:
            continue
        if not left[rank]:
            finished[rank] = max(finished[rank], idle_since[rank])
            continue
        op, takes = left[rank][0]
        stage = [at for at, holder in enumerate(placement) if holder == rank][op.chunk]
        way = "F" if op.kind is Pass.FORWARD else "B"
        if op.kind is not Pass.WEIGHT and (way, op.microbatch, stage) not in there:
            continue
        first = (rank, len(schedule.order[rank]) - len(left[rank])) in schedule.together
        left[rank].pop(0)
        idle[rank].append((idle_since[rank], now))
        busy.add(rank)
        heapq.heappush(heap, (now + takes, rank, done))
        following = stage + (1 if way == "F" else -1)
        if op.kind is not Pass.WEIGHT and 0 <= following <= last:
            other = placement[following]
            token = (way, op.microbatch, following)
            if other == rank:
                there.add(token)
            else:
                sends[rank].append((other, token))
        while sends[rank] and not first:
            heapq.heappush(heap, (now + takes + costs.p2p_ns, *sends[rank].pop()))
    ready = [end + reduce for end, reduce in zip(finished, costs.reduce_ns, strict=True)]
    for row, end in zip(idle, ready, strict=True):
        row.append((end, max(ready)))
    return [[(start, end) for start, end in row if end > start] for row in idle]


def differs(seed: int) -> bool:
    """True if the timeline's bubbles of the random case are not those of the events."""
    schedule, costs, durations = random_case(seed)
    found = Compiled(schedule).run(costs, durations).waits
    return [[(wait.start_ns, wait.end_ns) for wait in row] for row in found] != events(schedule, costs, durations)


def ideal_bubble_share(stages: int, microbatches: int, chunks: int = 1) -> float:
    """The bubble share of GPipe and 1F1B, or with more than one chunk of interleaved 1F1B.

    Narayanan et al. 2021 (arXiv 2104.04473), sections 2.2.1 and 2.2.2, give the ratio of bubble time to compute time:
    (p - 1) / (v * m).  That is (p - 1) / (v * m + p - 1) of the total, for every group size that Megatron accepts.
    """
    return (stages - 1) / (chunks * microbatches + stages - 1)
