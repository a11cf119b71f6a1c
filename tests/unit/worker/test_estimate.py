from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.worker.estimate import QUANTILE, WINDOW, NodeEstimators, StepEstimator


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
    recent = sorted(durations[-WINDOW:])
    assert estimator.estimate_ns == recent[int(QUANTILE * (len(recent) - 1))]


def test_a_rare_node_is_expected_to_be_as_much_slower_as_the_others_are():
    nodes = NodeEstimators()
    nodes.expect([100, 200, 0])
    assert [nodes.estimate_ns(node) for node in range(4)] == [100, 200, 0, 0]
    for _ in range(20):
        nodes.observe(0, 150)
    assert [nodes.estimate_ns(node) for node in range(2)] == [150, 300]
    for _ in range(5):  # its own word counts for more, once there is enough of it
        nodes.observe(1, 210)
    assert nodes.estimate_ns(1) == 210
    nodes.observe(3, 70)  # not in the profile
    assert nodes.estimate_ns(3) == 70
