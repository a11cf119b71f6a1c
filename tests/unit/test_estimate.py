from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.runtime.estimate import StepEstimator


def test_nothing_is_known_at_first():
    assert StepEstimator().estimate_ns == 0


def test_a_slow_first_step_does_not_count_once_there_are_others():
    estimator = StepEstimator()
    for duration in (900, 10, 11):
        estimator.observe(duration)
    assert estimator.estimate_ns == 10


def test_a_task_that_slows_down_is_followed_within_half_the_window():
    estimator = StepEstimator()
    for _ in range(100):
        estimator.observe(10)
    for _ in range(16):
        estimator.observe(50)
    assert estimator.estimate_ns == 50


@given(st.lists(st.integers(1, 10**9), min_size=5, max_size=120))
def test_it_is_the_quantile_of_the_window(durations):
    estimator = StepEstimator()
    for duration in durations:
        estimator.observe(duration)
    recent = sorted(durations[-estimator.window :])
    assert estimator.estimate_ns == recent[int(estimator.quantile * (len(recent) - 1))]
