"""Where bubble time went: by hand, and that it always adds up."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.report.seen import seen
from megatron.fill.report.timeuse import TimeUse, time_use
from megatron.fill.types import Bubble, BubbleKind, BubbleUse, Lack, RankInfo, RankRecord, WorkerRecord
from tests.support.synthetic import report_of, synthetic_run

DOC = Path(__file__).parents[3] / "docs" / "report.md"
START = 10**12
INFO = RankInfo(0, 1, 0, 1, 0, 1, 0, 1)


def bubble(number: int, length: int, predicted: int = 0, seq: int = 0, filling: bool = True, index: int = 0) -> Bubble:
    """One of ``length`` ns that begins 1000 ns after the one before it."""
    start = START + 1000 * number
    return Bubble(number, index, BubbleKind.FILL, start, start + length, predicted, seq, 0, filling)


def use(
    number: int, seq: int, harvested: int, left: int, lack: Lack = Lack.TIME, latency: int = 0, held: int = 0
) -> BubbleUse:
    """``left``: from the beginning of bubble ``number``."""
    return BubbleUse(seq, latency, harvested, 0, 1, START + 1000 * number + left, lack, held)


def worker(*uses: BubbleUse, older_uses: int = 0, harvested: int | None = None) -> WorkerRecord:
    total = sum(its.harvested_ns for its in uses) if harvested is None else harvested
    return WorkerRecord("job", 0, len(uses), 0.0, total, 0, 0.0, uses, older_uses=older_uses)


def split(bubbles: list[Bubble], *workers: WorkerRecord) -> dict[str, int]:
    """Without what nothing is in."""
    found = time_use(seen(RankRecord(INFO, [], bubbles, [])).bubbles, workers)
    return {use: nanoseconds for use, nanoseconds in found.items() if nanoseconds}


def test_a_bubble_is_split_at_the_last_pause_and_at_the_predicted_end():
    # 0 .. 50 with steps of 40 in all; then 30 until the predicted end and 20 after it.
    assert split([bubble(1, 100, 80, seq=1)], worker(use(1, 1, 40, 50))) == {
        "steps": 40,
        "runtime": 10,
        "little_time": 30,
        "past_prediction": 20,
    }


def test_the_time_up_to_the_first_step_and_that_held_are_told_apart():
    # Held until 30, woken up at 34, 4 between steps; and one that ended while it was held.
    bubbles = [bubble(1, 100, 0, seq=1), bubble(2, 20, 0, seq=2)]
    its = worker(use(1, 1, 52, 90, latency=4, held=30), use(2, 2, 0, 21, latency=-1, held=20))
    assert split(bubbles, its) == {"steps": 52, "waking": 4, "held": 50, "runtime": 4, "past_prediction": 10}


def test_of_two_jobs_the_first_one_woke_up():
    first, tail = worker(use(1, 1, 40, 50, latency=6)), worker(use(1, 1, 25, 80, latency=55))
    for workers in ([tail, first], [first, tail]):
        assert split([bubble(1, 80, 80, seq=1)], *workers) == {"steps": 65, "waking": 6, "runtime": 9}


def test_steps_past_the_predicted_end_leave_only_what_is_after_them():
    found = split([bubble(1, 100, 60, seq=1)], worker(use(1, 1, 85, 90)))
    assert found == {"steps": 85, "runtime": 5, "past_prediction": 10}


def test_a_worker_that_is_done_after_the_bubble_has_left_nothing_of_it():
    assert split([bubble(1, 100, 80, seq=1)], worker(use(1, 1, 95, 130))) == {"steps": 95, "runtime": 5}


@pytest.mark.parametrize(
    ("lack", "expected"),
    [(Lack.MEMORY, "little_memory"), (Lack.JOB, "no_job")],
)
def test_what_else_was_lacking_has_the_rest_of_the_bubble(lack: Lack, expected: str):
    found = split([bubble(1, 100, 80, seq=1)], worker(use(1, 1, 40, 50, lack)))
    assert found == {"steps": 40, "runtime": 10, expected: 50}


def test_of_two_jobs_the_one_that_was_done_last_says_what_was_lacking():
    tail, first = worker(use(1, 1, 25, 80, Lack.TIME)), worker(use(1, 1, 40, 50, Lack.MEMORY))
    for workers in ([tail, first], [first, tail]):
        found = split([bubble(1, 100, 95, seq=1)], *workers)
        assert found == {"steps": 65, "runtime": 15, "little_time": 15, "past_prediction": 5}


def test_a_gate_that_stayed_shut():
    shut = [bubble(1, 10), bubble(2, 20, predicted=5), bubble(3, 40, filling=False)]
    assert split(shut) == {"not_predicted": 10, "too_short": 5, "past_prediction": 15}


def test_bubbles_before_between_and_after_the_words_of_a_worker():
    bubbles = [bubble(number, 10**number, 10**number, seq=number) for number in range(1, 3)]
    bubbles += [bubble(number, 5 * number, 100, seq=number) for number in range(3, 6)]
    its = worker(use(2, 2, 100, 100), use(4, 4, 20, 20))
    assert split(bubbles, its) == {"steps": 120, "missed": 15, "no_job": 10 + 25}
    assert split(bubbles, replace(its, older_uses=1)) == {"steps": 120, "missed": 15, "no_job": 25, "not_known": 10}


def test_of_what_is_only_known_in_sum_the_harvest_is_known():
    bubbles = [bubble(0, 1000, index=-1), bubble(1, 100, 100, seq=7)]
    its = worker(use(1, 7, 60, 100), older_uses=6, harvested=60 + 700)
    assert split(bubbles, its) == {"steps": 760, "runtime": 40, "not_known": 300}
    assert split(bubbles, replace(its, harvested_ns=10**9)) == {"steps": 1060, "runtime": 40}


def test_words_of_bubbles_that_are_not_recorded_count_nowhere():
    assert split([bubble(1, 100, 100, seq=2)], worker(use(0, 1, 50, 50), use(9, 3, 50, 50))) == {"missed": 100}
    assert split([], worker(use(0, 1, 50, 50))) == {}


durations = st.integers(0, 900)
odd = st.sampled_from([0, 1, 10**15]) | durations
bubbles_of_a_rank: st.SearchStrategy[list[dict[str, Any]]] = st.lists(
    st.builds(dict, length=durations, predicted=odd, opened=st.booleans(), filling=st.booleans(), folded=st.booleans()),
    max_size=12,
)
uses_of_a_worker = st.lists(
    st.builds(use, *[st.integers(0, 14)] * 2, odd, odd, st.sampled_from(list(Lack)), odd, odd), max_size=12
)
workers_of_a_rank = st.lists(
    st.builds(
        lambda uses, older, more: replace(worker(*uses, older_uses=older), harvested_ns=more),
        *(uses_of_a_worker, st.integers(0, 2), odd),
    ),
    max_size=4,
)


@settings(max_examples=300)
@given(bubbles_of_a_rank, workers_of_a_rank)
def test_the_parts_add_up_whatever_the_workers_say(shapes: list[dict], workers: list[WorkerRecord]):
    bubbles, seq = [], 0
    for number, shape in enumerate(shapes):
        opened = shape["opened"] and shape["filling"] and not shape["folded"]
        seq += opened
        place = {"seq": seq * opened, "index": -1 if shape["folded"] else 0, "filling": shape["filling"]}
        bubbles.append(bubble(number, shape["length"], shape["predicted"], **place))
    found = time_use(seen(RankRecord(INFO, [], bubbles, [])).bubbles, workers)
    assert sum(found.values()) == sum(its.duration_ns for its in bubbles if its.filling)
    assert min(found.values()) >= 0


def test_the_shares_of_a_report_add_up_for_each_rank_and_stage_and_in_all():
    ranks, workers, jobs = synthetic_run()
    report = report_of(ranks, workers, jobs)
    for totals in (*report.ranks, *report.stages, report.total):
        assert sum(totals.time_use_ns.values()) == round(totals.fillable_s * 1e9)
        assert totals.harvested_s is not None
        assert totals.time_use_ns[TimeUse.STEPS] == round(totals.harvested_s * 1e9)
    # Rank 0: in 4 of its iterations 4 steps of 4 ms after 0.1 ms in 20 ms, and 9.9 of 12 ms in steps after 0.1 ms.
    parts = {"steps": 103_600_000, "waking": 800_000, "little_time": 15_600_000}
    assert {use: ns for use, ns in report.ranks[0].time_use_ns.items() if ns} == parts


def test_the_document_explains_every_entry_and_no_other():
    [section] = re.findall(
        r"^\*\*Where the bubble time went\*\*.*?(?=^\*\*)", DOC.read_text(encoding="utf-8"), re.M | re.S
    )
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(TimeUse)
