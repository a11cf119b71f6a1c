"""What schedules leave: bubbles of known kinds, cycles for the planner, activations; and that no order leaves less."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.pipeline.bubbles import (
    bubble_cycle,
    bubble_seconds,
    bubble_share,
    peak_activation_bytes,
    peak_activations,
)
from megatron.fill.pipeline.costs import PipelineCosts
from megatron.fill.pipeline.schedule import Pass, Schedule
from megatron.fill.pipeline.schedules import gpipe, interleaved, one_forward_one_backward, zb_h1
from megatron.fill.pipeline.timeline import simulate
from megatron.fill.profiles import BubbleSlot
from megatron.fill.types import BubbleKind
from tests.unit.pipeline.test_timeline import cases

FILL, FWD_BWD, INTERIOR, DRAIN = BubbleKind.FILL, BubbleKind.FWD_BWD, BubbleKind.INTERIOR, BubbleKind.DRAIN
MS = 1_000_000

# Milliseconds of the bubbles of a real run on two CPU cores over gloo, two stages and four microbatches with 1F1B, as
# docs/benchmarks/fill.json has them.  The drain bubbles after the last pass are one per collective.
RECORDED = {
    0: [
        *((INTERIOR, 0.04), (FWD_BWD, 232.16), (INTERIOR, 9.09), (INTERIOR, 16.38), (INTERIOR, 144.40)),
        *((DRAIN, 2.50), (DRAIN, 0.81), (DRAIN, 1.56), (DRAIN, 3.84), (DRAIN, 0.57)),
    ],
    1: [
        *((FILL, 139.56), (INTERIOR, 0.35), (INTERIOR, 11.02), (INTERIOR, 11.61)),
        *((DRAIN, 0.04), (DRAIN, 227.30), (DRAIN, 0.90), (DRAIN, 1.18), (DRAIN, 2.29), (DRAIN, 0.47)),
    ],
}
RECORDED_ITERATION_MS = 1927.0


def test_a_simulated_cycle_has_the_kinds_and_sizes_of_a_recorded_one():
    # Stage 1 waits for a forward at first and for a backward at the end; the two say all else.
    forward_ns, backward_ns = round(139.56 * MS), round(227.30 * MS)
    costs = PipelineCosts.uniform(2, forward_ns, backward_ns, p2p_ns=10_000)
    timeline = simulate(one_forward_one_backward(2, 4), costs, rendezvous=True)
    for rank, recorded in RECORDED.items():
        slots = bubble_cycle(timeline, rank, 0).slots
        in_passes = [kind for kind, _ in recorded if kind is not DRAIN]
        assert [slot.kind for slot in slots if slot.kind is not DRAIN] == in_passes
        long = [(slot.kind, slot.duration_ns / MS) for slot in slots if slot.duration_ns > 50 * MS]
        assert long == [(kind, pytest.approx(ms, rel=0.05)) for kind, ms in recorded if ms > 50]
    total_ms = sum(ms for row in RECORDED.values() for _, ms in row)
    assert bubble_share(timeline) == pytest.approx(total_ms / (2 * RECORDED_ITERATION_MS), abs=0.015)
    # The optimizer's time is not in the bubbles.
    assert 0.9 * RECORDED_ITERATION_MS < timeline.period_ns / MS < RECORDED_ITERATION_MS


def test_bubbles_by_kind():
    timeline = simulate(one_forward_one_backward(2, 2), PipelineCosts.uniform(2, 10, 20, optimizer_ns=5, reduce_ns=3))
    assert bubble_seconds(timeline) == (
        {FILL: 0.0, FWD_BWD: 20e-9, INTERIOR: 10e-9, DRAIN: 0.0},
        {FILL: 10e-9, FWD_BWD: 0.0, INTERIOR: 0.0, DRAIN: 20e-9},
    )
    assert bubble_share(timeline) == pytest.approx(60 / (2 * 98))
    assert bubble_share(simulate(gpipe(2, 1), PipelineCosts.uniform(2, 0, 0))) == 0.0


@settings(max_examples=60)
@given(cases(), st.booleans())
def test_the_kinds_of_a_rank_come_in_the_order_of_its_work(case, rendezvous: bool):
    for row in simulate(case[0], case[1], rendezvous).waits:
        kinds = [wait.kind for wait in row]
        assert kinds == sorted(kinds, key=lambda kind: {FILL: 0, FWD_BWD: 1, INTERIOR: 1, DRAIN: 2}[kind])
        assert kinds.count(FILL) <= 1 >= kinds.count(FWD_BWD)


@settings(max_examples=60)
@given(cases(), st.booleans())
def test_a_cycle_has_all_of_a_ranks_bubble_time(case, rendezvous: bool):
    timeline = simulate(case[0], case[1], rendezvous)
    for rank, by_kind in enumerate(bubble_seconds(timeline)):
        cycle = bubble_cycle(timeline, rank, 7)
        assert cycle.period_ns == timeline.period_ns
        assert cycle.bubble_ns / 1e9 == pytest.approx(sum(by_kind.values()))
        assert {slot.free_bytes for slot in cycle.slots} <= {7}


def test_a_cycle_is_in_the_order_of_the_waits():
    timeline = simulate(one_forward_one_backward(3, 3), PipelineCosts.uniform(3, 10, 20))
    assert bubble_cycle(timeline, 1, 5).slots == (
        BubbleSlot(FILL, 10, 5),
        BubbleSlot(FWD_BWD, 20, 5),
        BubbleSlot(INTERIOR, 10, 5),
        BubbleSlot(DRAIN, 20, 5),
    )


def test_a_rank_that_is_not_there_has_no_cycle():
    timeline = simulate(one_forward_one_backward(2, 2), PipelineCosts.uniform(2, 10, 20))
    with pytest.raises(ValueError, match="rank is 2; expected 0 to 1"):
        bubble_cycle(timeline, 2, 0)


@pytest.mark.parametrize("microbatches", [1, 3, 4, 9])
def test_peak_activations(microbatches: int):
    in_flight = tuple(min(4 - rank, microbatches) for rank in range(4))
    assert peak_activations(one_forward_one_backward(4, microbatches)) == in_flight
    assert peak_activations(gpipe(4, microbatches)) == (microbatches,) * 4
    assert peak_activations(zb_h1(4, microbatches)) == (min(4, microbatches),) * 4


def test_peak_activations_of_interleaved():
    # Warm-up forwards and the first of the steady state: (p - r - 1) * 2 + (v - 1) * p + 1.
    assert peak_activations(interleaved(4, 8, 2)) == (11, 9, 7, 5)
    sizes = [100, 200, 10, 20]
    assert peak_activation_bytes(interleaved(2, 2, 2), sizes) == (220, 420)
    with pytest.raises(ValueError, match="3 kept_bytes; expected 4: one each"):
        peak_activation_bytes(interleaved(2, 2, 2), [1, 2, 3])


class Search:
    """The shortest iteration of all orders of some passes with some memory, by trying what every rank can do each tick.

    Microbatches are alike, so any order can be renamed into one in which each rank takes them first to last without
    changing a time: the counts of what each rank has done are the whole state.  Passes take whole ticks; a rank may
    idle.
    """

    def __init__(self, microbatches: int, ticks: dict[Pass, int], most_held: tuple[int, ...]) -> None:
        self.microbatches, self.ticks, self.most_held = microbatches, ticks, most_held
        self.kinds = list(ticks)

    def shortest(self) -> int:
        """In ticks."""
        ranks = len(self.most_held)
        idle: tuple = ((0,) * len(self.kinds), None, 0)  # passes done, the pass that runs, ticks that it still takes
        states, now = {(idle,) * ranks}, 0
        done = ((self.microbatches,) * len(self.kinds), None, 0)
        while (done,) * ranks not in states:
            states = {after for state in states for after in self.tick(state)}
            now += 1
        return now

    def tick(self, state: tuple) -> set[tuple]:
        """All states a tick later."""
        empty: tuple[Any, ...] = ()
        choices = [self.choices(state, rank) for rank in range(len(state))]
        return set(functools.reduce(lambda rows, ways: [(*row, way) for row in rows for way in ways], choices, [empty]))

    def choices(self, state: tuple, rank: int) -> list[tuple]:
        counts, running, left = state[rank]
        if running is not None:
            return [self.advanced(counts, running, left)]
        can_run = [kind for kind in range(len(self.kinds)) if self.can_run(state, rank, kind)]
        return [state[rank], *(self.advanced(counts, kind, self.ticks[self.kinds[kind]]) for kind in can_run)]

    def advanced(self, counts: tuple[int, ...], kind: int, left: int) -> tuple:
        if left > 1:
            return counts, kind, left - 1
        return (*counts[:kind], counts[kind] + 1, *counts[kind + 1 :]), None, 0

    def can_run(self, state: tuple, rank: int, kind: int) -> bool:
        counts = state[rank][0]
        if counts[kind] == self.microbatches:
            return False
        if kind == 0:
            arrived = rank == 0 or state[rank - 1][0][0] > counts[0]
            return arrived and counts[0] - counts[-1] < self.most_held[rank]
        if kind == 1 and rank < len(state) - 1 and state[rank + 1][0][1] <= counts[1]:
            return False
        return counts[kind] < counts[kind - 1]


SMALL = [(stages, microbatches) for stages in (1, 2, 3) for microbatches in (1, 2, 3)]


def period(schedule: Schedule, forward: int, backward: int, weight: int = 0) -> int:
    return simulate(schedule, PipelineCosts.uniform(schedule.stages, forward, backward, weight)).period_ns


@pytest.mark.parametrize(("stages", "microbatches"), [*SMALL, (2, 5), (3, 4)])
def test_no_order_of_whole_backwards_is_shorter_than_1f1b(stages: int, microbatches: int):
    unbounded = (microbatches,) * stages
    for forward, backward in ((1, 1), (1, 2)):
        search = Search(microbatches, {Pass.FORWARD: forward, Pass.BACKWARD: backward}, unbounded)
        assert search.shortest() == period(one_forward_one_backward(stages, microbatches), forward, backward)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (3, 3), (3, 4)])
def test_less_memory_than_1f1bs_takes_longer(stages: int, microbatches: int):
    schedule = one_forward_one_backward(stages, microbatches)
    peaks = peak_activations(schedule)
    less = (peaks[0] - 1, *peaks[1:])
    ticks = {Pass.FORWARD: 1, Pass.BACKWARD: 1}
    assert Search(microbatches, ticks, peaks).shortest() == period(schedule, 1, 1)
    assert Search(microbatches, ticks, less).shortest() > period(schedule, 1, 1)


@pytest.mark.parametrize(("stages", "microbatches"), [*SMALL, (2, 5), (3, 4)])
def test_no_order_of_split_backwards_with_its_memory_is_shorter_than_zb_h1(stages: int, microbatches: int):
    schedule = zb_h1(stages, microbatches)
    ticks = {Pass.FORWARD: 1, Pass.INPUT: 1, Pass.WEIGHT: 1}
    assert Search(microbatches, ticks, peak_activations(schedule)).shortest() == period(schedule, 1, 2, 1)


@pytest.mark.parametrize("passes", [(1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2)])
def test_nor_is_one_where_passes_differ(passes: tuple[int, int, int]):
    forward, input_, weight = passes
    for stages, microbatches in ((2, 1), (2, 3), (3, 2)):
        schedule = zb_h1(stages, microbatches)
        ticks = dict(zip((Pass.FORWARD, Pass.INPUT, Pass.WEIGHT), passes, strict=True))
        shortest = Search(microbatches, ticks, peak_activations(schedule)).shortest()
        assert shortest == period(schedule, forward, input_ + weight, weight)
