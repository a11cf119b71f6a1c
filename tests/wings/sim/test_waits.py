"""Whom a rank waited for: a stage that computed, one whose host was late, or the transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.pipeline.timeline import simulate
from megatron.fill.types import Bubble, BubbleKind, CycleKey, Iteration, RankInfo, RankRecord, Span
from megatron.fill.wings.sim.report import waits
from tests.support.recorded_runs import records
from tests.support.synthetic import synthetic_run

MS = 1_000_000
NEAR = pytest.approx

type Stretches = Sequence[tuple[float, float]]


def stage(
    number: int,
    forwards: Stretches,
    backwards: Stretches,
    bubbles: Stretches,
    *,
    stages: int = 2,
    node: int = 0,
    shift_ms: float = 0,
    schedule: str = "1f1b",
    end_ms: float = 100,
    device: str = "cpu",
) -> RankRecord:
    """One iteration of a stage, in ms; its clock is ahead by a shift."""

    def at(time_ms: float) -> int:
        return int((1000 + time_ms + shift_ms) * MS)

    named = [("forward", one) for one in forwards] + [("backward", one) for one in backwards]
    spans = [Span(name, 1, at(a), at(b)) for name, (a, b) in sorted(named, key=lambda one: one[1])]
    kind = BubbleKind.INTERIOR
    return RankRecord(
        RankInfo(number, stages, number, stages, node, 1 + node, number, stages, device=device),
        [Iteration(1, at(0), at(end_ms))],
        [Bubble(1, index, kind, at(a), at(b)) for index, (a, b) in enumerate(bubbles)],
        spans,
        schedule=CycleKey(schedule, len(forwards)),
    )


def parts(records: Sequence[RankRecord]) -> dict[tuple[int, int], tuple[float, float, float]]:
    """Milliseconds of waits by rank and peer: the peer computed, its host was late, the transfer."""
    ms = [(one.computed_s * 1e3, one.host_s * 1e3, one.transfer_s * 1e3) for one in waits(records)]
    return {(one.rank, one.peer): its for one, its in zip(waits(records), ms, strict=True)}


# One microbatch: stage 0 sends at 10 (a bubble begins: its own wait), stage 1 takes it.
FIRST: tuple[Stretches, Stretches] = [(0, 10)], [(60, 80)]


def test_a_stage_that_computes_is_waited_for():
    records = [
        stage(0, *FIRST, bubbles=[(10, 60), (80, 81)]),
        stage(1, [(12, 32)], [(32, 58)], bubbles=[(0, 12), (58, 59), (59, 81)]),
    ]
    found = parts(records)
    # Its forward and its backward; three transfers, and what stage 0 waited for at the end was one too.
    assert found[1, 0] == NEAR((10 + 20, 0, 2 + 1 + 1 + 1))
    assert found[0, 1] == NEAR((46, 0, 2 + 2 + 1))


def test_a_host_that_posts_late_is_waited_for():
    """Stage 0 has its result at 10, sends it at 25, and the bubble of its send begins then."""
    records = [
        stage(0, *FIRST, bubbles=[(25, 60), (80, 81)]),
        stage(1, [(26, 46)], [(46, 58)], bubbles=[(0, 26), (58, 59), (59, 81)]),
    ]
    assert parts(records)[1, 0][:2] == NEAR((10 + 20, 15))


def test_what_comes_after_the_send_is_the_transfer():
    """Stage 0 has sent at 10, and what it does then is not what stage 1 waits for."""
    forwards, backwards = [(0, 10), (11, 30)], [(70, 80), (80, 90)]
    records = [
        stage(0, forwards, backwards, bubbles=[(10, 11), (30, 70)], end_ms=92),
        stage(1, [(28, 40), (50, 60)], [(40, 50), (60, 68)], bubbles=[(0, 28), (68, 92)], end_ms=92),
    ]
    computed, host, transfer = parts(records)[1, 0]
    assert (computed, host) == NEAR((10 + 20, 0))
    assert transfer == NEAR(18 + 2 + 2)


def test_a_wait_for_a_stage_that_waits_is_one_for_the_stage_behind_it():
    records = [
        stage(0, [(0, 10)], [(70, 80)], bubbles=[(10, 70)], stages=3),
        stage(1, [(11, 20)], [(60, 69)], bubbles=[(0, 11), (20, 60)], stages=3),
        stage(2, [(21, 41)], [(41, 59)], bubbles=[(0, 21)], stages=3),
    ]
    found = parts(records)
    assert found[2, 0] == NEAR((10, 0, 1))  # the transfer from stage 0 to stage 1
    assert found[2, 1] == NEAR((9, 0, 1))
    assert found[0, 2] == NEAR((38, 0, 1))


@pytest.mark.parametrize("came_ms", [95, 105])
def test_a_collective_waits_for_a_late_host_of_another_pipeline(came_ms: float):
    """All ranks meet at the end, rank 3 at 95: between its passes until then.  One that comes later has no part."""
    end_ms = came_ms + 5
    records = [
        stage(0, *FIRST, bubbles=[(10, 60), (80, 100)], end_ms=end_ms),
        stage(1, [(12, 32)], [(32, 58)], bubbles=[(0, 12), (58, 59), (59, 100)], end_ms=end_ms),
        stage(0, *FIRST, bubbles=[(10, 60), (80, end_ms)], end_ms=end_ms),
        stage(1, [(12, 32)], [(32, 58)], bubbles=[(0, 12), (58, 59), (came_ms, end_ms)], end_ms=end_ms),
    ]
    records[2:] = [
        replace(one, info=replace(one.info, rank=2 + at, tensor_parallel_rank=1)) for at, one in enumerate(records[2:])
    ]
    found = parts(records)
    if came_ms < 100:
        assert found[0, 3] == found[1, 3] == NEAR((0, 15, 5))
    else:
        assert {pair for pair in found if pair[0] < 2} == {(0, 1), (1, 0)}
    waited_ms = [sum(sum(its) for pair, its in found.items() if pair[0] == rank) for rank in range(4)]
    assert waited_ms == NEAR([sum(one.duration_ns for one in record.bubbles) / MS for record in records])


def test_a_send_of_gloo_waits_for_its_receiver():
    """Stage 1 comes to its receive at 50 only: until then its host was late, to both."""
    forwards, backwards = [(0, 10), (51, 60)], [(90, 95), (96, 99)]
    records = [
        stage(0, forwards, backwards, [(10, 51), (60, 90)]),
        stage(1, [(52, 60), (75, 80)], [(60, 75), (80, 89)], [(50, 52)]),
    ]
    assert parts(records)[0, 1][1] == NEAR(40)
    on_cuda = [replace(one, info=replace(one.info, device="cuda:0")) for one in records]
    assert parts(on_cuda)[0, 1][1] == 0


def test_clocks_of_two_nodes_are_set_by_the_end_of_the_iteration():
    usual = [stage(0, *FIRST, bubbles=[(10, 60)]), stage(1, [(12, 32)], [(32, 58)], bubbles=[(0, 12)])]
    apart = [usual[0], stage(1, [(12, 32)], [(32, 58)], bubbles=[(0, 12)], node=1, shift_ms=5e6)]
    assert parts(apart) == {key: NEAR(its) for key, its in parts(usual).items()}


@pytest.mark.parametrize("schedule", ["marked by hand", "graph", "interleaved"])
def test_an_order_of_passes_that_is_not_known_is_left_out(schedule):
    records = [
        stage(0, *FIRST, bubbles=[(10, 60)], schedule=schedule),
        stage(1, [(12, 32)], [(32, 58)], bubbles=[(0, 12)], schedule=schedule),
    ]
    assert waits(records) == []


def test_a_pass_before_its_input_is_of_another_order():
    records = [stage(0, *FIRST, bubbles=[(10, 60)]), stage(1, [(2, 32)], [(32, 58)], bubbles=[(0, 2)])]
    assert waits(records) == []


def test_a_pipeline_without_a_stage_is_left_out():
    assert waits([stage(0, *FIRST, bubbles=[(10, 60)])]) == []
    assert waits([]) == []


def test_the_pipelines_of_context_parallelism_are_told_apart():
    alike = [(stage(0, *FIRST, bubbles=[(10, 60)]), stage(1, [(12, 32)], [(32, 58)], bubbles=[(0, 12)]))] * 2
    four = [
        replace(one, info=replace(one.info, rank=one.info.stage + 2 * at, context_parallel_rank=at))
        for at, its in enumerate(alike)
        for one in its
    ]
    assert parts(four) == parts(four[:2]) | {(3, 2): parts(four[:2])[1, 0], (2, 3): parts(four[:2])[0, 1]}


def test_the_size_of_groups_of_microbatches_says_which_stage_is_waited_for():
    schedule = make_schedule("interleaved", 2, 8, 2, 4)
    stages = tuple(StageCost((9 + at) * MS, (20 - at) * MS) for at in range(4))
    costs = PipelineCosts(stages, MS // 4, (2 * MS,) * 2, (3 * MS,) * 2)
    made = records(schedule, [simulate(schedule, costs)] * 2, [MS] * 2)
    assert waits(made) == []  # in groups of two, the usual ones, passes would begin before their input
    found = waits([replace(one, schedule=replace(one.schedule, group_size=4)) for one in made if one.schedule])
    bubbles_s = {one.info.rank: sum(its.duration_ns for its in one.bubbles) / 1e9 for one in made}
    assert {one.rank: one.computed_s + one.host_s + one.transfer_s for one in found} == NEAR(bubbles_s)


def test_all_of_the_bubbles_of_the_synthetic_run_are_accounted_for():
    ranks, _, _ = synthetic_run()
    found = waits([replace(record, schedule=CycleKey("1f1b", 2)) for record in ranks])
    assert {(one.rank, one.peer): one.iterations for one in found} == {(0, 1): 10, (1, 0): 10}
    bubbles = {0: 10 * 0.030, 1: 10 * 0.030}
    assert {one.rank: one.computed_s for one in found} == NEAR(bubbles)
    assert [one.host_s + one.transfer_s for one in found] == NEAR([0, 0])
