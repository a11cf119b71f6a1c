"""Every second of long idle time has one cause: by hand."""

from __future__ import annotations

import pytest

from megatron.fill.account import Spent
from megatron.fill.records.account import AccountRecord
from megatron.fill.types import Bubble, BubbleKind, BubbleUse, Lack, RankInfo, RankRecord, WorkerRecord
from scripts.benchmarks.bench_idle import shares
from scripts.benchmarks.idle_causes import bubble_causes, causes_of

MS = 1_000_000
FILL, DRAIN, SAVE = BubbleKind.FILL, BubbleKind.DRAIN, BubbleKind.SAVE
INFO = RankInfo(0, 2, 0, 2, 0, 1, 0, 2)


def bubble(
    iteration: int, ms: float, seq: int = 0, filling: bool = True, kind: BubbleKind = FILL, predicted_ms: float = 0
) -> Bubble:
    start = iteration * 1000 * MS + (500 * MS if kind is SAVE else 0)
    return Bubble(iteration, 0, kind, start, start + int(ms * MS), int(predicted_ms * MS), seq, 0, filling)


def use(seq: int, steps_ms: float, iteration: int, left_ms: float) -> BubbleUse:
    left = int(iteration * 1000 * MS + left_ms * MS)
    return BubbleUse(seq, 0, int(steps_ms * MS), 0, 1, left, Lack.TIME)


def account(**long_ms: float) -> AccountRecord:
    spent = {name.replace("_", " "): Spent(int(ms * MS) + 1, int(ms * MS), 1) for name, ms in long_ms.items()}
    return AccountRecord(0, 0, 2, 10**12, True, spent)


def worker(*uses: BubbleUse) -> WorkerRecord:
    return WorkerRecord("job", 0, 1, 0.0, sum(its.harvested_ns for its in uses), 0, 0.0, uses)


def found(bubbles: list[Bubble], *uses: BubbleUse, settled_after: int = 0, **long_ms: float) -> dict[str, float]:
    record = RankRecord(INFO, [], bubbles, [], settled_after=settled_after)
    return {cause: ns / MS for cause, ns in causes_of(record, [worker(*uses)], account(**long_ms)).items()}


def test_a_training_that_begins_is_filled_and_probed():
    bubbles = [
        bubble(1, 10, filling=False),
        bubble(2, 20, seq=1, predicted_ms=20),
        bubble(3, 30, seq=2, predicted_ms=30),
        bubble(4, 40, filling=False),
        bubble(5, 0.5, seq=3, predicted_ms=0.5),
        bubble(5, 8, predicted_ms=0),
    ]
    uses = (use(1, 4, 2, 20), use(2, 24, 3, 26), use(3, 0.5, 5, 0.5))
    assert found(bubbles, *uses, settled_after=2, fill=108, host=3) == {
        "warm-up": 10,
        "jobs start": 16,
        "filled": 28,
        "runtime": 2,
        "little time": 4,
        "probes": 40,
        "not predicted": 8,
        "host": 3,
    }


def test_a_bubble_in_a_save_is_no_second_time_in_its_name():
    bubbles = [bubble(1, 10, seq=1, predicted_ms=10), bubble(1, 50, seq=2, kind=SAVE, predicted_ms=50)]
    uses = (use(1, 10, 1, 10), use(2, 40, 1, 550))
    assert found(bubbles, *uses, fill=10, save=70, forward=500) == {
        "filled": 50,
        "runtime": 10,
        "save": 20,
    }


def test_a_wait_that_no_record_has_is_told():
    assert found([bubble(1, 10, filling=False)], fill=12, drain=5, evaluation=100) == {"warm-up": 10, "not seen": 7}


def test_causes_that_round_to_nothing_are_not_printed():
    assert shares({"filled": 3.0, "save": 1.0, "host": 0.001}) == ["filled            75.0%", "save              25.0%"]


@pytest.mark.parametrize("name", ["start-up", "load", "unnamed", "optimizer"])
def test_what_is_no_idle_time_of_iterations_does_not_count(name):
    assert causes_of(RankRecord(INFO, [], [], []), [], AccountRecord(0, 0, 2, 10, True, {name: Spent(5, 5, 1)})) == {}


def test_bubbles_of_one_kind_are_apart():
    bubbles = [
        bubble(1, 10, filling=False, kind=DRAIN),
        bubble(2, 20, seq=1, predicted_ms=20),
        bubble(3, 30, seq=2, predicted_ms=30, kind=DRAIN),
        bubble(4, 40, filling=False, kind=DRAIN),
        bubble(4, 7, filling=False),
    ]
    uses = (use(1, 15, 2, 20), use(2, 24, 3, 30))
    its = bubble_causes(RankRecord(INFO, [], bubbles, []), [worker(*uses)], DRAIN)
    ms = {cause: ns / MS for cause, ns in its.items() if ns}
    assert ms == {"warm-up": 10, "filled": 24, "runtime": 6, "probes": 40}


def test_bubbles_from_an_iteration_on_are_apart_and_warm_up_ends_where_it_did():
    bubbles = [
        bubble(1, 10, filling=False),
        bubble(2, 20, seq=1, predicted_ms=20),
        bubble(3, 30, seq=2, predicted_ms=30),
        bubble(4, 40, filling=False),
    ]
    uses = (use(1, 15, 2, 20), use(2, 24, 3, 30))
    its = bubble_causes(RankRecord(INFO, [], bubbles, []), [worker(*uses)], start=3)
    assert {cause: ns / MS for cause, ns in its.items() if ns} == {"filled": 24, "runtime": 6, "probes": 40}
    only_off = bubble_causes(RankRecord(INFO, [], bubbles, []), [worker(*uses)], start=4)
    assert {cause: ns / MS for cause, ns in only_off.items() if ns} == {"probes": 40}
