"""What the configurator is checked against: an evaluation by events, and networks that nobody has."""

from __future__ import annotations

import heapq
import random
from math import exp, log

from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.wings.configure.latency import Iteration
from megatron.fill.wings.configure.links import Links
from megatron.fill.wings.mainjob.parallel import Parallel


def event_times(its: Iteration) -> int:
    """The iteration's length in ns, by discrete events: a rank runs the next pass of its row once its input is there.

    It shares the schedule's rows with the timeline, and nothing else.
    """
    para = its.parallel
    name = "interleaved" if para.chunks > 1 else "1f1b"
    rows = make_schedule(name, para.pp, para.microbatches, para.chunks).order
    last = para.pp * para.chunks - 1
    ends = [0] * para.pp
    for transfers in its.transfers_ns:
        arrived: dict[tuple[bool, int, int], int] = {}  # forward or not, micro-batch, virtual stage -> when
        at = [0] * para.pp
        free = list(its.costs.optimizer_ns)
        events = [(time_ns, rank) for rank, time_ns in enumerate(free)]
        heapq.heapify(events)
        while events:
            now, rank = heapq.heappop(events)
            if now < free[rank] or at[rank] == len(rows[rank]):
                continue
            op = rows[rank][at[rank]]
            virtual = op.chunk * para.pp + rank
            forward = op.kind.value == "F"
            inner = virtual > 0 if forward else virtual < last
            key = forward, op.microbatch, virtual
            if inner and arrived.get(key, now + 1) > now:
                continue  # its arrival is an event, too
            at[rank] += 1
            cost = its.costs.stages[virtual]
            free[rank] = now + (cost.forward_ns if forward else cost.backward_ns)
            heapq.heappush(events, (free[rank], rank))
            following = virtual + (1 if forward else -1)
            if 0 <= following <= last:
                other = following % para.pp
                over = transfers[rank][0] if forward else transfers[other][1]
                arrived[forward, op.microbatch, following] = free[rank] + over
                heapq.heappush(events, (free[rank] + over, other))
        ends = [max(pair) for pair in zip(ends, free, strict=True)]
    return max(map(sum, zip(ends, its.reduce_ns, strict=True)))


def random_iteration(source: random.Random) -> Iteration:
    """Uneven stages, a time of its own for each link and direction, several replicas."""
    pp = source.randint(1, 8)
    chunks = source.choice((1, 1, 2, 3)) if pp > 1 else 1
    microbatches = source.randint(1, 4) * pp if chunks > 1 else source.randint(1, 4 * pp)
    dp = source.randint(1, 3)

    def times(count: int, most: int) -> tuple[int, ...]:
        return tuple(source.randint(0, most) for _ in range(count))

    stages = tuple(StageCost(source.randint(1, 1000), source.randint(1, 2000)) for _ in range(pp * chunks))
    links = pp if pp > 1 else 0
    transfers = tuple(tuple(zip(times(links, 800), times(links, 800), strict=True)) for _ in range(dp))
    schedule = "interleaved" if chunks > 1 else "1f1b"
    para = Parallel(pp=pp, dp=dp, chunks=chunks, global_batch=microbatches * dp, schedule=schedule)
    costs = PipelineCosts(stages, 0, (0,) * pp, times(pp, 500))
    return Iteration(para, costs, transfers, times(pp, 1000))


def random_links(source: random.Random, nodes: int, gpus_per_node: int, spread: float = 8.0) -> Links:
    """Nodes whose links differ up to ``spread`` times, log-uniformly; alike in both directions and inside nodes."""
    fastest = 25e9
    between = {
        (one, other): fastest * exp(source.uniform(log(1 / spread), 0)) for one in range(nodes) for other in range(one)
    }
    ranks = range(nodes * gpus_per_node)
    place = [rank // gpus_per_node for rank in ranks]

    def speed(one: int, other: int) -> float:
        here, there = place[one], place[other]
        return 300e9 if here == there else between[max(here, there), min(here, there)]

    rows = [[speed(one, other) for other in ranks] for one in ranks]
    return Links(rows, [[10e-6] * len(ranks)] * len(ranks), tuple(place))
