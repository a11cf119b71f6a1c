"""When the passes of an iteration happen: closed forms, laws, and a slow reference of another kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.pipeline.bubbles import bubble_share
from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.schedule import Op, Pass, Schedule
from megatron.fill.pipeline.schedules import (
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    make_schedule,
    megatrons,
    one_forward_one_backward,
    zb_h1,
)
from megatron.fill.pipeline.timeline import Compiled, Timeline, simulate
from megatron.fill.types import BubbleKind
from tests.support.schedule_events import ideal_bubble_share
from tests.support.schedule_text import parsed
from tests.unit.pipeline.test_schedule import schedules

TIMES = st.integers(0, 50)


def splits_backward(schedule: Schedule) -> bool:
    """True if backward passes run in two parts."""
    return any(op.kind is Pass.WEIGHT for row in schedule.order for op in row)


def zb_h1_bubble_ns(stages: int, forward_ns: int, input_ns: int, weight_ns: int) -> int:
    """The bubble time in ns of each rank with ZB-H1: (p - 1)(F + I - W) (Qi et al. 2023, arXiv 2401.10241, table 2).

    It holds for at least as many microbatches as stages, and for weight passes that are no longer than the others.
    """
    return (stages - 1) * (forward_ns + input_ns - weight_ns)


@st.composite
def costs_for(draw: st.DrawFn, schedule: Schedule) -> PipelineCosts:
    """Any: stages, passes and ranks differ."""
    stages = []
    for _ in range(schedule.virtual_stages):
        weight_ns = draw(TIMES)
        stages.append(StageCost(draw(TIMES), draw(TIMES) + weight_ns, weight_ns))
    per_rank = st.lists(TIMES, min_size=schedule.stages, max_size=schedule.stages).map(tuple)
    return PipelineCosts(tuple(stages), draw(st.integers(0, 20)), draw(per_rank), draw(per_rank))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, PipelineCosts]:
    schedule = draw(schedules(most_stages=4, most_microbatches=6))
    return schedule, draw(costs_for(schedule))


def place(schedule: Schedule, rank: int, op: Op) -> tuple[bool, int, int]:
    return op.kind is Pass.FORWARD, op.microbatch, schedule.virtual_stage(rank, op)


def pass_ns(costs: PipelineCosts, virtual: int, kind: Pass) -> int:
    stage = costs.stages[virtual]
    return {
        Pass.FORWARD: stage.forward_ns,
        Pass.BACKWARD: stage.backward_ns,
        Pass.INPUT: stage.backward_ns - stage.weight_ns,
        Pass.WEIGHT: stage.weight_ns,
    }[kind]


def relaxed(schedule: Schedule, costs: PipelineCosts) -> dict[tuple[int, Op], tuple[int, int]]:
    """Start and end of each pass: begin with 0 everywhere, and put off what starts too early until nothing does."""
    starts = {(rank, op): 0 for rank, row in enumerate(schedule.order) for op in row}
    at = {place(schedule, rank, op): (rank, op) for rank, op in starts if op.kind is not Pass.WEIGHT}

    def end(rank: int, op: Op) -> int:
        return starts[rank, op] + pass_ns(costs, schedule.virtual_stage(rank, op), op.kind)

    changed = True
    while changed:
        changed = False
        for rank, row in enumerate(schedule.order):
            for position, op in enumerate(row):
                earliest = end(rank, row[position - 1]) if position else costs.optimizer_ns[rank]
                forward, microbatch, virtual = place(schedule, rank, op)
                source = at.get((forward, microbatch, virtual + (-1 if forward else 1)))
                if source is not None and op.kind is not Pass.WEIGHT:
                    earliest = max(earliest, end(*source) + (costs.p2p_ns if source[0] != rank else 0))
                if earliest > starts[rank, op]:
                    starts[rank, op] = earliest
                    changed = True
    return {key: (start, end(*key)) for key, start in starts.items()}


def assert_lawful(timeline: Timeline) -> None:
    """Nothing overlaps on a rank, nothing is lost, and what is needed is there in time."""
    schedule, costs = timeline.schedule, timeline.costs
    ends = {
        place(schedule, rank, span.op): (rank, span.end_ns)
        for rank, spans in enumerate(timeline.spans)
        for span in spans
        if span.op.kind is not Pass.WEIGHT
    }
    for rank, (spans, waits) in enumerate(zip(timeline.spans, timeline.waits, strict=True)):
        assert [span.op for span in spans] == list(schedule.order[rank])
        assert all(wait.duration_ns > 0 for wait in waits)
        taken = sorted([(start, end) for _, start, end in spans] + [(start, end) for _, start, end in waits])
        assert taken[0][0] >= costs.optimizer_ns[rank]
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))
        busy = costs.optimizer_ns[rank] + costs.reduce_ns[rank] + sum(end - start for start, end in taken)
        assert busy == timeline.period_ns
        for span in spans:
            forward, microbatch, virtual = place(schedule, rank, span.op)
            source = ends.get((forward, microbatch, virtual + (-1 if forward else 1)))
            if source is not None and span.op.kind is not Pass.WEIGHT:
                assert span.start_ns >= source[1] + (costs.p2p_ns if source[0] != rank else 0)


@settings(max_examples=120)
@given(cases())
def test_eager_times_are_those_of_the_reference(case: tuple[Schedule, PipelineCosts]):
    schedule, costs = case
    timeline = simulate(schedule, costs)
    times = {(rank, span.op): (span.start_ns, span.end_ns) for rank, row in enumerate(timeline.spans) for span in row}
    assert times == relaxed(schedule, costs)
    ends = [max(span.end_ns for span in row) for row in timeline.spans]
    assert timeline.period_ns == max(end + reduce for end, reduce in zip(ends, costs.reduce_ns, strict=True))


@settings(max_examples=100)
@given(cases(), st.booleans())
def test_a_timeline_is_lawful(case: tuple[Schedule, PipelineCosts], rendezvous: bool):
    assert_lawful(simulate(*case, rendezvous))


@settings(max_examples=100)
@given(cases(), st.booleans())
def test_no_period_is_shorter_than_the_longest_chain(case: tuple[Schedule, PipelineCosts], rendezvous: bool):
    schedule, costs = case
    period_ns = simulate(schedule, costs, rendezvous).period_ns
    through = sum(
        stage.forward_ns + stage.backward_ns - (stage.weight_ns if splits_backward(schedule) else 0)
        for stage in costs.stages
    )
    hops = 2 * (schedule.virtual_stages - 1) if schedule.stages > 1 else 0
    first_rank_ns = costs.optimizer_ns[0] + costs.reduce_ns[0]
    assert period_ns >= first_rank_ns + through + hops * costs.p2p_ns
    for rank in range(schedule.stages):
        mine = [costs.stages[chunk * schedule.stages + rank] for chunk in range(schedule.chunks)]
        compute = schedule.microbatches * sum(stage.forward_ns + stage.backward_ns for stage in mine)
        assert period_ns >= costs.optimizer_ns[rank] + compute + costs.reduce_ns[rank]


@settings(max_examples=60)
@given(cases(), st.data())
def test_a_straggler_never_shortens_the_period(case: tuple[Schedule, PipelineCosts], data: st.DataObject):
    schedule, costs = case
    rank = data.draw(st.integers(0, schedule.stages - 1))
    factor = data.draw(st.floats(1, 4))
    for rendezvous in (False, True):
        compiled = Compiled(schedule, rendezvous)
        assert compiled.run(costs.slowed(rank, factor)).period_ns >= compiled.run(costs).period_ns


@settings(max_examples=60)
@given(cases())
def test_holding_the_sender_never_shortens_the_period(case: tuple[Schedule, PipelineCosts]):
    assert simulate(*case, rendezvous=True).period_ns >= simulate(*case).period_ns


@settings(max_examples=60)
@given(cases(), st.booleans(), st.data())
def test_durations_take_the_place_of_costs(case: tuple[Schedule, PipelineCosts], rendezvous: bool, data: st.DataObject):
    schedule, costs = case
    compiled = Compiled(schedule, rendezvous)
    assert compiled.run(costs, compiled.durations(costs)) == compiled.run(costs)
    durations = [[data.draw(TIMES) for _ in row] for row in schedule.order]
    timeline = compiled.run(costs, durations)
    assert [[span.end_ns - span.start_ns for span in row] for row in timeline.spans] == durations
    assert_lawful(timeline)


@pytest.mark.parametrize("stages", range(1, 9))
def test_closed_forms_of_gpipe_and_1f1b(stages: int):
    for microbatches in range(1, 17):
        costs = PipelineCosts.uniform(stages, 30, 70)
        for schedule in (gpipe(stages, microbatches), one_forward_one_backward(stages, microbatches)):
            for rendezvous in (False, True):
                timeline = simulate(schedule, costs, rendezvous)
                assert timeline.period_ns == (microbatches + stages - 1) * 100
                assert bubble_share(timeline) == pytest.approx(ideal_bubble_share(stages, microbatches))


@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_closed_form_of_interleaved_with_every_group_size(stages: int):
    for microbatches in range(stages, 13):
        for group in range(stages, microbatches + 1):
            if 0 < microbatches % group < stages:
                continue
            for chunks in (2, 3):
                schedule = interleaved(stages, microbatches, chunks, group)
                timeline = simulate(schedule, PipelineCosts.uniform(stages, 10, 20, chunks=chunks))
                assert timeline.period_ns == (chunks * microbatches + stages - 1) * 30
                assert bubble_share(timeline) == pytest.approx(ideal_bubble_share(stages, microbatches, chunks))


@pytest.mark.parametrize("passes", [(1, 1, 1), (5, 6, 4), (2, 3, 2), (3, 2, 0)])
def test_closed_form_of_zb_h1(passes: tuple[int, int, int]):
    forward, input_, weight = passes
    for stages in range(1, 9):
        for microbatches in range(stages, 17):
            costs = PipelineCosts.uniform(stages, forward, input_ + weight, weight)
            timeline = simulate(zb_h1(stages, microbatches), costs)
            bubble_ns = zb_h1_bubble_ns(stages, forward, input_, weight)
            assert [sum(wait.duration_ns for wait in row) for row in timeline.waits] == [bubble_ns] * stages


@pytest.mark.parametrize(("microbatches", "passes"), [(3, (1, 1, 1)), (8, (1, 2, 2)), (8, (2, 1, 2))])
def test_where_the_closed_form_of_zb_h1_does_not_hold(microbatches: int, passes: tuple[int, int, int]):
    forward, input_, weight = passes
    costs = PipelineCosts.uniform(4, forward, input_ + weight, weight)
    timeline = simulate(zb_h1(4, microbatches), costs)
    bubble_ns = timeline.period_ns - microbatches * sum(passes)
    assert bubble_ns > zb_h1_bubble_ns(4, forward, input_, weight)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_closed_form_of_dualpipe_v(stages: int):
    """(p - 1)(F&B + B - 3W) of a chunk's passes: github.com/deepseek-ai/DualPipe, on half the ranks."""
    timeline = simulate(dualpipe_v(stages, 3 * stages), PipelineCosts.uniform(stages, 10, 20, 10, 2))
    for row in timeline.waits:
        assert sum(wait.duration_ns for wait in row) == (stages - 1) * (30 + 20 - 3 * 10)


def test_the_times_of_a_small_1f1b():
    timeline = simulate(one_forward_one_backward(2, 2), PipelineCosts.uniform(2, 10, 20, optimizer_ns=5, reduce_ns=3))
    assert [(str(op), start, end) for op, start, end in timeline.spans[0]] == [
        ("F0", 5, 15),
        ("F1", 15, 25),
        ("B0", 45, 65),
        ("B1", 75, 95),
    ]
    assert timeline.waits[0] == ((BubbleKind.FWD_BWD, 25, 45), (BubbleKind.INTERIOR, 65, 75))
    assert timeline.waits[1] == ((BubbleKind.FILL, 5, 15), (BubbleKind.DRAIN, 78, 98))
    assert timeline.period_ns == 98


def test_ranks_that_wait_for_each_other_are_found():
    schedule = parsed("1f1b: 2 stages, 2 microbatches, 1 chunks:\n0: F0 F1 B0 B1\n1: F1 F0 B0 B1")
    assert simulate(schedule, PipelineCosts.uniform(2, 1, 2)).period_ns == 10
    with pytest.raises(ValueError, match=r"ranks 0, 1 wait for each other's transfers forever; the schedule is\n1f1b"):
        Compiled(schedule, rendezvous=True)


@pytest.mark.parametrize("called", ["1f1b", "gpipe", "interleaved", "own"])
@pytest.mark.parametrize(
    "schedule",
    [
        one_forward_one_backward(4, 8),
        gpipe(4, 8),
        interleaved(4, 8, 2),
        interleaved(4, 10, 2, 5),
        zb_h1(4, 8),
        looped_bfs(2, 1, 2),
    ],
    ids=lambda its: f"{its.name}-{its.microbatches}",
)
def test_a_schedules_name_does_not_change_its_transfers(schedule: Schedule, called: str):
    """Its passes say whether Megatron runs it, and so where its transfers are waited for."""
    costs = PipelineCosts.uniform(schedule.stages, 10, 20, 10, chunks=schedule.chunks, p2p_ns=3)
    again = simulate(replace(schedule, name=called), costs, rendezvous=True)
    assert replace(again, schedule=schedule) == simulate(schedule, costs, rendezvous=True)


def test_megatrons_order_with_stages_elsewhere_is_not_megatrons():
    assert megatrons(gpipe(2, 2)) == ("gpipe", None)
    assert megatrons(replace(gpipe(2, 2), placement=(1, 0))) is None


def test_passes_as_one_action_are_not_megatrons():
    """A receiver of the first pass's output waits for the second, also where that one is a weight pass."""
    assert megatrons(replace(one_forward_one_backward(2, 2), together=frozenset({(0, 0)}))) is None
    alone, both = zb_h1(2, 2), replace(zb_h1(2, 2), together=frozenset({(1, 3)}))
    assert " ".join(map(str, both.order[0][4:] + both.order[1][3:5])) == "I1 W1 I1 W0"
    for rendezvous in (False, True):
        found = [simulate(its, PipelineCosts.uniform(2, 1, 5, 2), rendezvous).spans[0][4] for its in (alone, both)]
        assert [span.start_ns for span in found] == [10, 11]


def test_a_slow_receiver_holds_its_sender():
    costs = PipelineCosts((StageCost(1, 1), StageCost(100, 1)), 0, (0, 0), (0, 0))
    eager, held = (simulate(gpipe(2, 3), costs, rendezvous) for rendezvous in (False, True))
    assert [span.end_ns for span in eager.spans[0][:3]] == [1, 2, 3]
    assert [span.end_ns for span in held.spans[0][:3]] == [1, 2, 102]
    assert held.waits[0][0] == (BubbleKind.INTERIOR, 2, 101)


def test_a_transfer_between_chunks_on_one_rank_takes_no_time():
    schedule = parsed("interleaved: 1 stages, 1 microbatches, 2 chunks:\n0: F0 F0.1 B0.1 B0")
    timeline = simulate(schedule, PipelineCosts.uniform(1, 1, 2, chunks=2, p2p_ns=100))
    assert timeline.period_ns == 6
    assert timeline.waits == ((),)


def test_costs_and_durations_that_do_not_fit_are_refused():
    compiled = Compiled(one_forward_one_backward(2, 1))
    with pytest.raises(ValueError, match="3 ranks with 1 virtual stages each; expected 2 with 1 each for 1f1b"):
        compiled.run(PipelineCosts.uniform(3, 1, 1))
    with pytest.raises(ValueError, match="costs of 2 ranks with 2 virtual stages each"):
        compiled.durations(PipelineCosts.uniform(2, 1, 1, chunks=2))
    costs = PipelineCosts.uniform(2, 1, 1)
    with pytest.raises(ValueError, match=r"durations has \[2, 1\] times per rank; expected \[2, 2\]"):
        compiled.run(costs, [[1, 1], [1]])
    with pytest.raises(ValueError, match="durations has -1 ns"):
        compiled.run(costs, [[1, 1], [1, -1]])
    with pytest.raises(ValueError, match=r"transfers has \[1\] times per rank; expected \[1, 1\]"):
        compiled.run(costs, transfers=[[1]])
    with pytest.raises(ValueError, match="transfers has -1 ns"):
        compiled.run(costs, transfers=[[1], [-1]])


@pytest.mark.parametrize("rendezvous", [False, True])
def test_transfers_may_take_different_times(rendezvous: bool):
    costs = PipelineCosts.uniform(2, 10, 20, p2p_ns=3)
    compiled = Compiled(one_forward_one_backward(2, 2), rendezvous)
    counts = [len(row) - 1 for row in compiled.run(costs, empty=True).waits]  # the last one is for the collective
    alike = compiled.run(costs, transfers=[[3] * count for count in counts])
    assert alike == compiled.run(costs)
    late = [[3] * count for count in counts]
    late[1][0] += 5  # the first forward of the last stage, which all else waits for
    assert compiled.run(costs, transfers=late).period_ns == alike.period_ns + 5


def test_costs():
    costs = PipelineCosts.uniform(2, 10, 25, 15, chunks=2, p2p_ns=1, reduce_ns=7, optimizer_ns=9)
    assert (costs.ranks, costs.chunks, len(costs.stages)) == (2, 2, 4)
    slow = costs.slowed(1, 1.5)
    assert slow.stages == (StageCost(10, 25, 15), StageCost(15, 37, 22)) * 2
    assert (slow.reduce_ns, slow.optimizer_ns) == ((7, 7), (9, 14))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StageCost(-1, 2), "no negative time"),
        (lambda: StageCost(1, 2, 3), "a weight part within the backward pass"),
        (lambda: PipelineCosts((StageCost(1, 1),) * 3, 0, (0, 0), (0, 0)), "3 virtual stages on 2 ranks"),
        (lambda: PipelineCosts((StageCost(1, 1),) * 2, 0, (0, 0), (0,)), "2 reduce_ns and 1 optimizer_ns"),
        (lambda: PipelineCosts((), 0, (), ()), "0 reduce_ns"),
        (lambda: PipelineCosts((StageCost(1, 1),), -1), "no negative time"),
        (lambda: PipelineCosts((StageCost(1, 1),), 0, (-2,)), "no negative time"),
        (lambda: PipelineCosts.uniform(2, 1, 1).slowed(2, 2.0), "rank 2 slowed 2.0 times; expected 0 to 1"),
        (lambda: PipelineCosts.uniform(2, 1, 1).slowed(0, 0.0), "rank 0 slowed 0.0 times"),
    ],
)
def test_costs_that_cannot_be_are_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_make_schedule_makes_what_the_generators_make():
    assert make_schedule("gpipe", 3, 2) == gpipe(3, 2)
    assert make_schedule("1f1b", 3, 2) == one_forward_one_backward(3, 2)
    assert make_schedule("zb-h1", 3, 2) == zb_h1(3, 2)
    assert make_schedule("interleaved", 2, 3, 2, 3) == interleaved(2, 3, 2, 3)
