"""Execution plans: never over a bubble's time or memory, and as good as any way to stop early."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.errors import PlanError
from megatron.fill.planner.held import leftover, packed_ns, processing_time_s
from megatron.fill.planner.plan import Chunk, ExecutionPlan
from megatron.fill.planner.search import best_plan, lay
from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, NodeProfile
from megatron.fill.types import BubbleKind
from tests.support.plan_oracle import fractional_bound, optimum, runs, violations

GIB = 2**30


def cycle_of(*bubbles: tuple[int, int], period_ns: int = 1000) -> BubbleCycle:
    return BubbleCycle(period_ns, tuple(BubbleSlot(BubbleKind.INTERIOR, *bubble) for bubble in bubbles))


def profile_of(*nodes: tuple[int, int], batch: int = 1, work: float = 1.0) -> JobProfile:
    named = (NodeProfile(f"forward {at}", *node) for at, node in enumerate(nodes))
    return JobProfile(Configuration(batch), tuple(named), work)


def cycles(most: int = 4, longest: int = 30) -> st.SearchStrategy[BubbleCycle]:
    return st.lists(st.tuples(st.integers(0, longest), st.integers(0, 9)), min_size=1, max_size=most).map(
        lambda bubbles: cycle_of(*bubbles)
    )


def node_lists(most: int = 8, shortest: int = 0) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(shortest, 7), st.integers(0, 7)), min_size=1, max_size=most).filter(
        lambda nodes: sum(duration for duration, _ in nodes) > 0
    )


def nodes_of(chunk: Chunk, profile: JobProfile) -> tuple[NodeProfile, ...]:
    """The nodes that run in the chunk, in order, each of them once."""
    return (profile.nodes[chunk.first :] + profile.nodes[: chunk.first])[: chunk.count]


profile_lists = st.lists(st.tuples(node_lists(), st.integers(1, 9)), min_size=1, max_size=3).map(
    lambda drawn: [profile_of(*nodes, batch=at, work=work) for at, (nodes, work) in enumerate(drawn, 1)]
)


@given(cycles(), node_lists(), st.integers(0, 5))
def test_a_plan_stays_within_every_bubble(cycle, nodes, reserve_ns):
    profile = profile_of(*nodes)
    plan = lay(cycle, profile, reserve_ns)
    shorter = BubbleCycle(
        1000, tuple(replace(slot, duration_ns=max(0, slot.duration_ns - reserve_ns)) for slot in cycle.slots)
    )
    if plan is None:
        assert not runs(shorter, profile) or any(slot.duration_ns <= reserve_ns for slot in cycle.slots)
    else:
        for chunk, duration_ns in zip(plan.chunks(), plan.durations_ns(profile), strict=True):
            slot = cycle.slots[chunk.bubble]
            assert duration_ns <= slot.duration_ns - reserve_ns
            assert all(node.memory_bytes <= slot.free_bytes for node in nodes_of(chunk, profile))
        assert violations(shorter, plan, profile) == 0
        assert plan.reserve_ns == reserve_ns


@given(cycles(most=3, longest=10), node_lists(most=4, shortest=1))
@settings(max_examples=60)
def test_no_way_to_stop_early_does_more_work(cycle, nodes):
    """The plan never stops early; the brute force may, after any node, in any bubble."""
    profile = profile_of(*nodes)
    plan = lay(cycle, profile)
    assert (plan.work_per_cycle if plan else 0.0) == pytest.approx(optimum(cycle, [profile]))


@given(cycles(), node_lists(), st.integers(0, 7))
def test_the_rate_is_the_same_from_every_start(cycle, nodes, turn):
    turned = nodes[turn % len(nodes) :] + nodes[: turn % len(nodes)]
    plan, other = lay(cycle, profile_of(*nodes)), lay(cycle, profile_of(*turned))
    assert (plan is None) == (other is None)
    if plan and other:
        assert plan.work_per_cycle == pytest.approx(other.work_per_cycle)


@given(cycles(), node_lists())
def test_no_plan_exceeds_the_fractional_bound(cycle, nodes):
    profile = profile_of(*nodes)
    plan = lay(cycle, profile)
    if plan:
        assert plan.work_per_cycle <= fractional_bound(cycle, profile) * (1 + 1e-9)


@given(cycles(), profile_lists)
def test_the_configuration_with_the_most_work_is_chosen(cycle, profiles):
    plans = [plan for profile in profiles if (plan := lay(cycle, profile))]
    if plans:
        assert best_plan(cycle, profiles).work_per_cycle == max(plan.work_per_cycle for plan in plans)
    else:
        with pytest.raises(PlanError):
            best_plan(cycle, profiles)


def test_of_equal_configurations_the_one_with_less_memory_is_chosen():
    large, small = profile_of((5, 9), batch=1), profile_of((5, 3), batch=2)
    assert best_plan(cycle_of((10, 9)), [large, small]).configuration == small.configuration


def test_several_iterations_fit_one_cycle():
    plan = best_plan(cycle_of((10, 1), (7, 1)), [profile_of((2, 1), (1, 1), work=4)])
    assert plan.counts == ((6, 4),)  # three iterations take 9, two take 6, and the next node takes 2
    assert plan.work_per_cycle == 4 * 5


def test_one_iteration_takes_many_cycles():
    plan = best_plan(cycle_of((5, 1)), [profile_of((5, 1), (3, 1), (4, 1), work=6)])
    assert (plan.iterations, plan.cycles) == (1, 3)
    assert plan.work_per_cycle == 2
    assert [chunk.first for chunk in plan.chunks()] == [0, 1, 2]


def test_a_large_node_waits_for_a_bubble_with_memory():
    plan = best_plan(cycle_of((10, 2), (10, 9)), [profile_of((1, 1), (1, 8))])
    assert plan.iterations == plan.cycles * 5  # the first bubble takes one small node, the second nine or ten
    assert {chunk.count for chunk in plan.chunks() if chunk.bubble == 0} <= {1}


@given(cycles(), node_lists(), st.integers(0, 3))
def test_the_json_form_is_read_back(cycle, nodes, reserve_ns):
    plan = lay(cycle, profile_of(*nodes, work=0.1), reserve_ns)
    if plan is not None:
        assert ExecutionPlan.from_dict(plan.to_dict()) == plan


def test_the_text_form_is_readable():
    plan = ExecutionPlan(Configuration(8), 4, 64.0, 3, ((3, 0, 2), (1, 0, 2)), 500)
    assert str(plan) == (
        "b8: 4 nodes do 64.0 work; a bubble's first 500 ns are reserved; 2 cycles:\nnode 3: 3 0 2\nnode 0: 1 0 2"
    )
    assert list(plan.chunks()) == [Chunk(0, 0, 3, 3), Chunk(0, 2, 2, 2), Chunk(1, 0, 0, 1), Chunk(1, 2, 1, 2)]


def test_wrong_json_is_refused():
    with pytest.raises(ValueError, match="not an execution plan: KeyError: 'work'"):
        ExecutionPlan.from_dict({"configuration": "b1"})


@pytest.mark.parametrize(
    ("cycle", "profiles", "reserve_ns", "message"),
    [
        (cycle_of(), [profile_of((1, 1))], 0, "the cycle has no bubbles"),
        (cycle_of((0, 1), (0, 1)), [profile_of((1, 1))], 0, "longest bubble is 0.000 ms; expected more than the 0.000"),
        (cycle_of((2_000_000, 1)), [profile_of((1, 1))], 3_000_000, "longest bubble is 2.000 ms; .* 3.000 ms"),
        (cycle_of((5, 1)), [], 0, "no profile"),
        (cycle_of((5, 1)), [profile_of((0, 1))], 0, "b1: all nodes take 0 ns"),
        (
            cycle_of((8_000_000, GIB), (10_000_000, GIB)),
            [profile_of((1_000_000, 1), (12_500_000, 1)), profile_of((99_000_000, 1), batch=2)],
            0,
            r"node 'forward 1' of b1 \(12.500 ms, 1 bytes\) is 2.500 ms too long for bubble 1 "
            r"\(interior, 10.000 ms, room for 1 GiB\), which fits it best$",
        ),
        (
            cycle_of((8_000_000, GIB), (10_000_000, GIB)),
            [profile_of((9_900_000, 1))],
            200_000,
            "0.100 ms too long for bubble 1 .*10.000 ms with 0.200 ms reserved",
        ),
        (
            cycle_of((10_000_000, GIB), (10_000_000, GIB // 2)),
            [profile_of((1_000_000, 3 * GIB))],
            0,
            "2 GiB too large for bubble 0 .*, room for 1 GiB",
        ),
        (
            cycle_of((1_000_000, 2 * GIB), (9_000_000, 0)),
            [profile_of((3_000_000, 3 * GIB))],
            0,
            "2.000 ms too long and 1 GiB too large for bubble 0",
        ),
    ],
)
def test_why_nothing_fits(cycle, profiles, reserve_ns, message):
    with pytest.raises(PlanError, match=message):
        best_plan(cycle, profiles, reserve_ns)


roomy_cycles = st.lists(st.tuples(st.integers(9, 40), st.integers(7, 20)), min_size=1, max_size=4).map(
    lambda bubbles: cycle_of(*bubbles)
)


@given(roomy_cycles, node_lists(), node_lists(most=3), st.integers(0, 2))
def test_a_second_job_fits_the_tails(cycle, nodes, tail_nodes, reserve_ns):
    """Bubble by bubble, both jobs together stay within its time, and their most memory within its memory."""
    profile, tail_profile = profile_of(*nodes), profile_of(*tail_nodes)
    plan = lay(cycle, profile, reserve_ns)
    assert plan is not None
    rest = leftover(cycle, plan, profile)
    assert rest.period_ns == cycle.period_ns * plan.cycles
    assert len(rest.slots) == len(cycle.slots) * plan.cycles
    used_chunks = sum(1 for _ in plan.chunks())
    assert rest.bubble_ns == pytest.approx(
        plan.cycles * (cycle.bubble_ns - packed_ns(plan, profile)) - used_chunks * reserve_ns
    )
    tail = lay(rest, tail_profile)
    for chunk, tail_ns in _timed(tail, tail_profile):
        number, bubble = divmod(chunk.bubble, len(cycle.slots))
        main_ns = sum(
            duration_ns for its, duration_ns in _timed(plan, profile) if (its.cycle, its.bubble) == (number, bubble)
        )
        slot = cycle.slots[bubble]
        assert main_ns + tail_ns <= slot.duration_ns
        largest = max(node.memory_bytes for node in nodes_of(chunk, tail_profile))
        assert largest == 0 or profile.memory_bytes + largest <= slot.free_bytes


def _timed(plan: ExecutionPlan | None, profile: JobProfile) -> list[tuple[Chunk, int]]:
    return list(zip(plan.chunks(), plan.durations_ns(profile), strict=True)) if plan else []


def test_a_tail_is_filled():
    cycle, profile = cycle_of((10, 9), (6, 9)), profile_of((4, 3))
    plan = best_plan(cycle, [profile])
    rest = leftover(cycle, plan, profile)
    assert [(slot.duration_ns, slot.free_bytes) for slot in rest.slots] == [(2, 6), (2, 6)]
    assert best_plan(rest, [profile_of((1, 6))]).work_per_cycle == 4
    with pytest.raises(PlanError, match="1 bytes too large"):
        best_plan(rest, [profile_of((1, 7))])


def test_processing_time():
    cycle = cycle_of((5, 1), period_ns=2_000_000_000)
    plan = best_plan(cycle, [profile_of((5, 1), (3, 1), work=6)])
    assert processing_time_s(cycle, plan, 30) == pytest.approx(20)  # 3 work in each cycle of 2 s
    assert processing_time_s(cycle, plan, 0) == 0
