"""How good are the execution plans, and how fast are they made?

Random bubble cycles and jobs, one pair per seed.  ``ratio`` is the work packed per cycle over the fractional upper
bound: the same job in the same bubbles, if a node could be split between bubbles; order and memory hold for it too,
and it may take the best configuration for itself, even where the nodes of that one hardly fit any bubble.  It is taken
over the instances where the largest node of the plan is at most a quarter of the smallest bubble with nodes in it.
Besides:

- ``_quarter``: over those instances, but the bound has to choose among the configurations whose largest node is as
  small as that, too;
- ``_every``: of those instances, the ones where that holds for every configuration;
- ``_more_batches``: the same, and ``_quarter_more_batches``, for jobs that offer a batch size between any two of the
  powers of two, too;
- ``_with_tail``: with a second job planned into what the first one leaves.  Its own ratio is added: work over what it
  could do by itself in the whole cycle;
- ``_any_order``: over a bound that ignores the order of the nodes, so that one which waits for a bubble with enough
  memory holds nothing up;
- ``small_``: small instances against every way to stop early, by brute force, in one configuration (``optimal``: the
  share with equal work) and with a free choice of the configuration for each iteration (``switching``: plan / optimum).

    python scripts/benchmarks/bench_plans.py --json docs/benchmarks/plans.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from math import inf, isclose
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.errors import PlanError
from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.planner.search import best_plan
from megatron.fill.planner.tail import leftover
from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, NodeProfile
from megatron.fill.types import BubbleKind
from scripts.benchmarks.plan_bound import fits, fractional_bound, runs
from scripts.benchmarks.random_plans import (
    GIB,
    MS,
    JobModel,
    log_uniform,
    random_cycle,
    random_model,
    small_tail_job,
)

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_MORE_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_NODE_SHARE = 0.25  # of the smallest bubble used, that the largest node takes at most where the ratio counts


def any_order_bound(cycle: BubbleCycle, profile: JobProfile) -> float:
    """Work per cycle if nodes could be split and came in any order: the nodes of at least some size need bubbles."""
    if not runs(cycle, profile):
        return 0.0
    iterations = inf
    for size in {node.memory_bytes for node in profile.nodes}:
        large = [node for node in profile.nodes if node.memory_bytes >= size]
        have_ns = sum(slot.duration_ns for slot in cycle.slots if any(fits(node, slot) for node in large))
        iterations = min(iterations, have_ns / sum(node.duration_ns for node in large))
    return iterations * profile.work


def violations(cycle: BubbleCycle, plan: ExecutionPlan, profile: JobProfile) -> int:
    """Bubbles whose time or memory the plan exceeds, node by node and without the planner's own arithmetic."""
    found, at = 0, plan.first_node
    for row in plan.counts:
        for slot, count in zip(cycle.slots, row, strict=True):
            nodes = [profile.nodes[(at + offset) % len(profile.nodes)] for offset in range(count)]
            too_long = sum(node.duration_ns for node in nodes) > slot.duration_ns
            found += too_long or any(node.memory_bytes > slot.free_bytes for node in nodes)
            at += count
    return found + (at % len(profile.nodes) != plan.first_node)


def optimum(cycle: BubbleCycle, profiles: Sequence[JobProfile]) -> float:
    """The most work per cycle of any way to stop early and to choose the configuration for each iteration.

    States are (configuration, next node), ``(-1, 0)`` between iterations; the best mean over all closed walks of cycles
    is found with Karp's theorem.
    """
    start = (-1, 0)
    edges: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        if state not in edges:
            ends = {state: 0.0}
            for slot in cycle.slots:
                ends = _ways(slot, profiles, ends)
            edges[state] = ends
            waiting += ends
    walks = [{start: 0.0}]
    for _ in edges:
        longer: dict[tuple[int, int], float] = {}
        for state, done in walks[-1].items():
            for end, work in edges[state].items():
                longer[end] = max(longer.get(end, -inf), done + work)
        walks.append(longer)
    steps = len(edges)
    return max(
        min((most - walks[k][end]) / (steps - k) for k in range(steps) if end in walks[k])
        for end, most in walks[-1].items()
    )


def _ways(
    slot: BubbleSlot, profiles: Sequence[JobProfile], begins: dict[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """The most work done per state that can be reached in a bubble, from any of the states before it."""
    best: dict[tuple[tuple[int, int], int], float] = {}
    waiting = [(state, 0, work) for state, work in begins.items()]
    while waiting:
        state, used_ns, work = waiting.pop()
        if best.get((state, used_ns), -1.0) >= work:
            continue
        best[state, used_ns] = work
        for number in range(len(profiles)) if state[0] < 0 else (state[0],):
            profile, node = profiles[number], profiles[number].nodes[state[1]]
            if used_ns + node.duration_ns <= slot.duration_ns and node.memory_bytes <= slot.free_bytes:
                last = state[1] + 1 == len(profile.nodes)
                after = (-1, 0) if last else (number, state[1] + 1)
                waiting.append((after, used_ns + node.duration_ns, work + profile.work * last))
    ends: dict[tuple[int, int], float] = {}
    for (state, _), work in best.items():
        ends[state] = max(ends.get(state, 0.0), work)
    return ends


def measure(seed: int, batches: Sequence[int]) -> dict[str, Any]:
    """One instance; ``ratio`` is None if nothing fits."""
    source = random.Random(seed)
    cycle = random_cycle(source, round(log_uniform(source, 1, 60)))
    free_bytes = max(slot.free_bytes for slot in cycle.slots)
    profiles = random_model(source, free_bytes, source.randint(2, 100)).profiles(batches)
    row: dict[str, Any] = {"seed": seed, "bubbles": len(cycle.slots), "nodes": len(profiles[0].nodes), "ratio": None}
    try:
        plan = best_plan(cycle, profiles)
    except PlanError:
        return row | {"violations": 0}
    profile = next(profile for profile in profiles if profile.configuration == plan.configuration)
    smallest_ns = min(cycle.slots[chunk.bubble].duration_ns for chunk in plan.chunks())
    largest = {its.configuration: max(node.duration_ns for node in its.nodes) / smallest_ns for its in profiles}
    bounds = {its.configuration: fractional_bound(cycle, its) for its in profiles}
    quarter = [bounds[configuration] for configuration, share in largest.items() if share <= _NODE_SHARE]
    rest = leftover(cycle, plan, profile)
    tail, tail_violations = measure_tail(cycle, rest, plan.cycles, small_tail_job(source, free_bytes))
    ratio = plan.work_per_cycle / max(bounds.values())
    return row | {
        "configuration": str(plan.configuration),
        "cycles": plan.cycles,
        "ratio": ratio,
        "ratio_quarter": plan.work_per_cycle / max(quarter) if largest[plan.configuration] <= _NODE_SHARE else None,
        "ratio_with_tail": ratio + tail,
        "ratio_any_order": plan.work_per_cycle / max(any_order_bound(cycle, profile) for profile in profiles),
        "node_share": largest[plan.configuration],
        "node_share_every": max(largest.values()),
        "violations": violations(cycle, plan, profile) + tail_violations,
    }


def measure_tail(
    cycle: BubbleCycle, rest: BubbleCycle, cycles: int, profiles: Sequence[JobProfile]
) -> tuple[float, int]:
    """Work of a second job in what is left of some cycles, over what it could do alone; and its violations."""
    try:
        plan = best_plan(rest, profiles)
    except PlanError:
        return 0.0, 0
    profile = next(profile for profile in profiles if profile.configuration == plan.configuration)
    alone = max(fractional_bound(cycle, profile) for profile in profiles)
    return plan.work_per_cycle / cycles / alone, violations(rest, plan, profile)


def measure_small(seed: int) -> tuple[float, float] | None:
    """Plan / optimum in one configuration, and with a free choice for each iteration; None if nothing fits."""
    source = random.Random(seed)
    slots = tuple(
        BubbleSlot(BubbleKind.INTERIOR, source.randint(0, 12), source.randint(2, 6))
        for _ in range(source.randint(1, 3))
    )
    profiles = []
    for batch in range(1, source.randint(1, 3) + 1):
        nodes = [
            NodeProfile(f"forward {i}", source.randint(1, 4) * batch, source.randint(0, 4))
            for i in range(source.randint(1, 5))
        ]
        profiles.append(JobProfile(Configuration(batch), tuple(nodes), batch * source.uniform(0.9, 1.3)))
    cycle = BubbleCycle(100, slots)
    try:
        work = best_plan(cycle, profiles).work_per_cycle
    except PlanError:
        return None
    return work / max(optimum(cycle, [profile]) for profile in profiles), work / optimum(cycle, profiles)


def measure_time(configurations: int, runs: int = 15) -> float:
    """Median ms for a plan of 500 nodes over 60 bubbles."""
    times = []
    for seed in range(runs):
        source = random.Random(seed)
        cycle = random_cycle(source, 60)
        model = JobModel(
            tuple(source.uniform(0.7, 1.3) for _ in range(248)), True, 0.3 * MS, 0.3 * MS, GIB / 20, GIB / 4000
        )
        profiles = model.profiles((2, 4))[:configurations]
        begin = time.perf_counter()
        best_plan(cycle, profiles)
        times.append((time.perf_counter() - begin) * 1e3)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="random instances, as many small ones (default: 1000)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    rows, more_rows = ([measure(seed, its) for seed in range(options.seeds)] for its in (_BATCHES, _MORE_BATCHES))
    small = [pair for pair in map(measure_small, range(options.seeds)) if pair]
    planned = [row for row in rows if row["ratio"] is not None]
    counted, more = (
        [row for row in its if row["ratio"] is not None and row["node_share"] <= _NODE_SHARE]
        for its in (rows, more_rows)
    )
    every = [row for row in counted if row["node_share_every"] <= _NODE_SHARE]
    summary: dict[str, float] = {
        "instances": len(rows),
        "planned": len(planned),
        "violations": sum(row["violations"] for row in rows + more_rows),
        "counted": len(counted),
        **spread("", [row["ratio"] for row in counted]),
        **spread("_quarter", [row["ratio_quarter"] for row in counted]),
        "counted_every": len(every),
        **spread("_every", [row["ratio"] for row in every]),
        "counted_more_batches": len(more),
        **spread("_more_batches", [row["ratio"] for row in more]),
        **spread("_quarter_more_batches", [row["ratio_quarter"] for row in more]),
        **spread("_with_tail", [row["ratio_with_tail"] for row in counted]),
        **spread("_any_order", [row["ratio_any_order"] for row in counted]),
        "plan_500x60_ms": measure_time(1),
        "plan_500x60_8_configurations_ms": measure_time(8),
        "small_counted": len(small),
        "small_optimal": sum(isclose(one, 1) for one, _ in small) / len(small),
        "small_switching_median": median(free for _, free in small),
        "small_switching_worst": min(free for _, free in small),
    }
    for name, value in summary.items():
        print(f"{name:<32} {value:.4g}")
    if options.json:
        command = " ".join(["python", "scripts/benchmarks/bench_plans.py", *sys.argv[1:]])
        worst = sorted(counted, key=lambda row: row["ratio"])[:20]
        data = {"command": command, "summary": summary, "worst": worst}
        Path(options.json).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"ratio_median{name}": median(values), f"ratio_worst{name}": min(values)} if values else {}


if __name__ == "__main__":
    main()
