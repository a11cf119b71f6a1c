from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.report.slowdown import paired_slowdown, watching_slowdown
from megatron.fill.types import Iteration

MS = 1_000_000


def blocks(pairs: list[tuple[list[int], list[int]]], on_first: bool = True) -> list[Iteration]:
    """Iterations of blocks with these durations in ns, one (on, off) pair after the other."""
    made: list[Iteration] = []
    at = 1000
    for number, (on, off) in enumerate(pairs):
        order = [(on, True), (off, False)] if on_first else [(off, False), (on, True)]
        for place, (durations, filling) in enumerate(order):
            for duration in durations:
                made.append(Iteration(len(made) + 1, at, at + duration, filling, 2 * number + place))
                at += duration
    return made


times = st.lists(st.integers(MS, 10_000 * MS), min_size=1, max_size=5)
same_length = st.integers(1, 5).flatmap(
    lambda length: st.tuples(*[st.lists(st.integers(MS, 10_000 * MS), min_size=length, max_size=length)] * 2)
)
some_pairs = st.lists(same_length, min_size=1, max_size=5)


@given(st.lists(times, min_size=1, max_size=5))
def test_equal_times_are_no_slowdown(durations: list[list[int]]) -> None:
    found = paired_slowdown(blocks([(its, its) for its in durations]))
    assert found is not None
    assert (found.mean, found.ci95, found.pairs) == (0.0, (0.0, 0.0), len(durations))


@given(st.lists(times, min_size=1, max_size=5))
def test_a_tenth_more_is_a_tenth(durations: list[list[int]]) -> None:
    found = paired_slowdown(blocks([([11 * time for time in its], [10 * time for time in its]) for its in durations]))
    assert found is not None
    assert found.mean == pytest.approx(0.1)
    assert found.ci95 == pytest.approx((0.1, 0.1))


@given(some_pairs, st.integers(2, 1000))
def test_the_unit_of_time_does_not_matter(pairs: list[tuple[list[int], list[int]]], factor: int) -> None:
    one = paired_slowdown(blocks(pairs))
    other = paired_slowdown(blocks([([factor * t for t in on], [factor * t for t in off]) for on, off in pairs]))
    assert one is not None
    assert other is not None
    assert other.mean == pytest.approx(one.mean)
    assert other.ci95 == pytest.approx(one.ci95)


@given(some_pairs)
def test_the_interval_holds_the_mean_of_some_resample(pairs: list[tuple[list[int], list[int]]]) -> None:
    found = paired_slowdown(blocks(pairs))
    assert found is not None
    assert found.ci95[0] <= found.ci95[1]
    assert found == paired_slowdown(blocks(pairs, on_first=False))


def test_by_hand() -> None:
    pairs = [([102, 102, 900], [100, 100, 100]), ([100, 101, 102], [100, 100, 90])]
    found = paired_slowdown(blocks(pairs))
    assert found is not None
    assert found.mean == pytest.approx((0.02 + 0.01) / 2)
    assert found.ci95 == pytest.approx((0.01, 0.02))
    assert found.pairs == 2


def test_the_interval_of_many_pairs_is_that_of_the_mean() -> None:
    ratios = [1.00, 1.01, 1.02, 1.03, 1.04] * 10
    found = paired_slowdown(blocks([([round(1000 * ratio)], [1000]) for ratio in ratios]))
    assert found is not None
    standard_error = 0.0002**0.5 / 50**0.5
    assert found.ci95[0] == pytest.approx(0.02 - 1.96 * standard_error, abs=2e-4)
    assert found.ci95[1] == pytest.approx(0.02 + 1.96 * standard_error, abs=2e-4)


@pytest.mark.parametrize(
    "iterations",
    [
        [],
        [Iteration(1, 0, 100)],
        blocks([([100, 100], [])]),
        blocks([([100, 100, 100, 100, 100], [100, 100])]),
        [Iteration(1, 0, 100, True, 0), Iteration(2, 100, 200, True, 1)],
        [Iteration(1, 0, 100, False, 1), Iteration(2, 100, 200, True, 2)],
        [Iteration(1, 0, 100, True, 0), Iteration(2, 100, 100, False, 1)],
    ],
    ids=["none", "outside", "no off block", "cut short", "both on", "not neighbours", "no time"],
)
def test_none_without_a_complete_pair(iterations: list[Iteration]) -> None:
    assert paired_slowdown(iterations) is None


def unwatched(took_ns: list[int], at: set[int], blocks: list[int] | None = None) -> list[Iteration]:
    """Iterations without filling, of which some are not watched."""
    blocks = blocks or [0] * len(took_ns)
    return [
        Iteration(number, 0, ns, False, block, number not in at)
        for number, (ns, block) in enumerate(zip(took_ns, blocks, strict=True))
    ]


def test_what_watching_costs_is_told_from_both_neighbours_so_that_a_drift_does_not_count() -> None:
    found = watching_slowdown(unwatched([1000, 1040, 1080], {1}))
    assert found is not None
    assert (found.mean, found.pairs) == (0.0, 1)
    found = watching_slowdown(unwatched([1020, 1000, 1040, 1020, 1000, 1040], {1, 4}, [1, 1, 1, 2, 2, 2]))
    assert found is not None
    assert (found.mean, found.pairs) == (pytest.approx(0.03), 2)


def test_an_iteration_at_the_edge_of_a_block_or_of_the_run_is_compared_with_none() -> None:
    assert watching_slowdown(unwatched([1000, 1040, 1080], {1}, [0, 1, 1])) is None
    assert watching_slowdown(unwatched([1000, 1040], {1})) is None
    assert watching_slowdown([]) is None


def test_iterations_that_are_not_watched_are_on_no_side_of_the_slowdown() -> None:
    made = blocks([([11 * MS] * 3, [10 * MS] * 3)])
    made[4] = replace(made[4], end_ns=made[4].start_ns + MS, watched=False)
    found = paired_slowdown(made)
    assert found is not None
    assert found.mean == pytest.approx(0.1)
