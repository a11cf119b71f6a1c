"""Schedules as data: their text form, what is not a schedule, and the orders that the generators make."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.pipeline.schedule import Pass, Schedule, execution_order
from megatron.fill.pipeline.schedules import (
    gpipe,
    interleaved,
    interleaved_warmup,
    make_schedule,
    one_forward_one_backward,
    zb_h1,
)
from tests.support.schedule_text import parsed

TWO = """1f1b: 2 stages, 4 microbatches, 1 chunks:
0: F0 F1 B0 F2 B1 F3 B2 B3
1: F0 B0 F1 B1 F2 B2 F3 B3"""


@st.composite
def schedules(draw: st.DrawFn, most_stages: int = 5, most_microbatches: int = 8) -> Schedule:
    """Any that the generators make of the schedules whose transfers may hold both ends."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1"]))
    if name != "interleaved":
        return make_schedule(name, draw(st.integers(1, most_stages)), draw(st.integers(1, most_microbatches)))
    stages = draw(st.integers(2, most_stages))
    group = draw(st.integers(stages, stages + 2))
    last = draw(st.sampled_from([0, *range(stages, group)]))
    return interleaved(stages, draw(st.integers(1, 2)) * group + last, draw(st.integers(2, 3)), group)


def test_1f1b_as_text():
    assert str(one_forward_one_backward(2, 4)) == TWO
    assert parsed(TWO) == one_forward_one_backward(2, 4)


def test_gpipe_keeps_the_order_of_1f1bs_backwards():
    assert str(gpipe(2, 3)).splitlines()[1:] == ["0: F0 F1 F2 B0 B1 B2", "1: F0 F1 F2 B0 B1 B2"]


def test_zb_h1_puts_weight_passes_off_by_the_rank():
    assert str(zb_h1(2, 3)).splitlines()[1:] == ["0: F0 F1 I0 W0 F2 I1 W1 I2 W2", "1: F0 I0 F1 I1 W0 F2 I2 W1 W2"]


def test_interleaved_takes_groups_and_chunks_from_the_last_on():
    first, last = interleaved(2, 4, 2).order
    assert " ".join(map(str, first)) == "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3"
    assert " ".join(map(str, last)) == "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"
    assert " ".join(map(str, interleaved(2, 5, 2, 3).order[0][:5])) == "F0 F1 F2 F0.1 F1.1"


def test_a_pipeline_too_deep_for_its_microbatches_warms_up_with_all_of_them():
    assert one_forward_one_backward(4, 2).order[0] == gpipe(4, 2).order[0]
    assert interleaved_warmup(4, 4, 2, 4, 0) == 8


@settings(max_examples=60)
@given(schedules())
def test_the_text_form_round_trips(schedule: Schedule):
    assert parsed(str(schedule)) == schedule


@settings(max_examples=60)
@given(schedules(), st.data())
def test_what_is_taken_comes_before_its_taker(schedule: Schedule, data: st.DataObject):
    passes = [(rank, op) for rank, row in enumerate(schedule.order) for op in row]
    sources = [number for row in schedule.sources() for number in row]
    at = data.draw(st.integers(0, len(passes) - 1))
    (rank, op), number = passes[at], sources[at]
    virtual = schedule.virtual_stage(rank, op)
    end = 0 if op.kind is Pass.FORWARD else schedule.virtual_stages - 1
    assert (number is None) == (op.kind is Pass.WEIGHT or virtual == end)
    if number is not None:
        other_rank, other = passes[number]
        assert (other.kind, other.microbatch) == (op.kind, op.microbatch)
        assert abs(schedule.virtual_stage(other_rank, other) - virtual) == 1
        assert abs(schedule.virtual_stage(other_rank, other) - end) == abs(virtual - end) - 1


@settings(max_examples=60)
@given(schedules(), st.data())
def test_a_schedule_without_one_of_its_passes_is_refused(schedule: Schedule, data: st.DataObject):
    rank = data.draw(st.integers(0, schedule.stages - 1))
    at = data.draw(st.integers(0, len(schedule.order[rank]) - 1))
    row = schedule.order[rank][:at] + schedule.order[rank][at + 1 :]
    order = (*schedule.order[:rank], row, *schedule.order[rank + 1 :])
    with pytest.raises(ValueError, match=f"rank {rank}: .*(missing|no whole backward|runs before)"):
        Schedule(schedule.name, schedule.stages, schedule.microbatches, schedule.chunks, order)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1f1b: 0 stages, 1 microbatches, 1 chunks:", "at least one stage"),
        ("1f1b: 2 stages, 1 microbatches, 1 chunks:\n0: F0 B0", "1 rows; expected 2"),
        ("1f1b: 1 stages, 1 microbatches, 1 chunks:\n0: F0 F0 B0", "F0 runs twice"),
        ("1f1b: 1 stages, 1 microbatches, 1 chunks:\n0: F0 B0 F1 B1", "F1 is outside of 1 microbatches"),
        ("1f1b: 1 stages, 1 microbatches, 1 chunks:\n0: F0 B0.1", "B0.1 is outside"),
        ("1f1b: 1 stages, 1 microbatches, 1 chunks:\n0: B0 F0", "B0 runs before its forward"),
        ("zb-h1: 1 stages, 1 microbatches, 1 chunks:\n0: F0 W0 I0", "W0 runs before its I"),
        ("zb-h1: 1 stages, 1 microbatches, 1 chunks:\n0: F0 I0", "microbatch 0, chunk 0 has no whole backward"),
        ("zb-h1: 1 stages, 1 microbatches, 1 chunks:\n0: F0 B0 I0 W0", "I0 is both whole and split"),
        ("zb-h1: 1 stages, 1 microbatches, 1 chunks:\n0: F0 I0 W0 B0", "B0 is both whole and split"),
        (
            "1f1b: 2 stages, 2 microbatches, 1 chunks:\n0: F0 B0 F1 B1\n1: F0 F1 B0 B1",
            r"a cycle: rank 0 at B0 waits for B0 of rank 1, which comes after F1; rank 1 .* is\n1f1b",
        ),
        ("interleaved: 1 stages, 1 microbatches, 2 chunks:\n0: F0 F0.1 B0 B0.1", "rank 0 at B0"),
        ("interleaved: 1 stages, 1 microbatches, 2 chunks:\n0: F0.1 F0 B0.1 B0", "rank 0 at F0.1"),
    ],
)
def test_what_is_no_schedule_is_refused_with_the_reason(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parsed(text)


def test_whole_and_split_backwards_may_meet():
    schedule = parsed("zb-h1: 2 stages, 1 microbatches, 1 chunks:\n0: F0 B0\n1: F0 I0 W0")
    assert schedule.sources() == [[None, 3], [0, None, None]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dualpipe", 2, 2), "'dualpipe' is not a schedule; expected one of gpipe, 1f1b, interleaved, looped-bfs"),
        (("1f1b", 2, 2, 2), "1f1b with 2 chunks; expected 1"),
        (("zb-h1", 2, 2, 1, 2), "zb-h1 with a group_size of 2; expected none"),
        (("gpipe", 0, 2), "expected at least one stage, microbatch and chunk; the schedule is"),
        (("zb-h1", 2, 0), "expected at least one stage, microbatch and chunk"),
        (("interleaved", 2, 2, 1), "2 stages and 1 chunks; expected at least 2 of each"),
        (("interleaved", 1, 2, 2), "1 stages and 2 chunks; expected at least 2 of each"),
        (("interleaved", 4, 2, 2), "interleaved with 2 microbatches; expected at least 4, one per stage"),
        (("interleaved", 4, 8, 2, 3), "group_size is 3; expected 4"),
        (("interleaved", 4, 10, 2), "the last of the groups of 4 has 2 of 10 microbatches; expected at least 4"),
    ],
)
def test_what_cannot_be_generated_is_refused(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)


@settings(max_examples=100)
@given(st.data())
def test_an_execution_order_has_every_step_after_what_it_needs_or_says_who_is_stuck(data: st.DataObject):
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    steps = sum(lengths)
    numbers = st.lists(st.integers(0, max(0, steps - 1)), max_size=2).map(tuple)
    needs = [[data.draw(numbers) for _ in range(length)] for length in lengths]
    order, stuck = execution_order(needs)
    flat = [need for row in needs for need in row]
    firsts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    for rank, first in enumerate(firsts):
        mine = [step for step in order if first <= step < first + lengths[rank]]
        assert mine == list(range(first, first + len(mine)))
    done: set[int] = set()
    for step in order:
        assert done.issuperset(flat[step])
        done.add(step)
    assert len(order) + sum(lengths[rank] - at for rank, at in stuck) == steps
    for rank, at in stuck:
        assert not done.issuperset(needs[rank][at])
