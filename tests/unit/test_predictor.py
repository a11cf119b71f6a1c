from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.predictor import BubblePredictor
from megatron.fill.types import BubbleKind, CycleKey

TRAINING = CycleKey("1f1b", 4)
EVALUATION = CycleKey("1f1b", 4, forward_only=True)
MS = 1_000_000


def cycle(
    predictor: BubblePredictor, durations: list[int], key: CycleKey = TRAINING, disturbed: bool = False
) -> list[int]:
    """Run one cycle; what was predicted for each of its bubbles."""
    predictor.cycle_started(key, disturbed)
    predictions = []
    for index, duration in enumerate(durations):
        predictions.append(predictor.predict(BubbleKind.INTERIOR, index))
        predictor.observe(BubbleKind.INTERIOR, index, duration)
    return predictions


def test_nothing_is_predicted_before_the_warmup():
    predictor = BubblePredictor(warmup=3)
    assert [cycle(predictor, [10 * MS, 5 * MS]) for _ in range(4)] == [[0, 0], [0, 0], [0, 0], [10 * MS, 5 * MS]]


def test_a_kind_that_does_not_match_is_not_predicted_and_starts_over():
    predictor = BubblePredictor(warmup=1)
    cycle(predictor, [10 * MS])
    predictor.cycle_started(TRAINING)
    assert predictor.predict(BubbleKind.FILL, 0) == 0
    predictor.observe(BubbleKind.FILL, 0, 3 * MS)
    predictor.cycle_started(TRAINING)
    assert predictor.predict(BubbleKind.FILL, 0) == 3 * MS


def test_evaluation_does_not_teach_training():
    predictor = BubblePredictor(warmup=2)
    for _ in range(3):
        cycle(predictor, [10 * MS])
    for _ in range(5):
        cycle(predictor, [1 * MS], EVALUATION)
    assert cycle(predictor, [10 * MS]) == [10 * MS]


def test_a_disturbed_cycle_is_neither_predicted_nor_learnt():
    predictor = BubblePredictor(warmup=2)
    for _ in range(3):
        cycle(predictor, [10 * MS])
    assert cycle(predictor, [500 * MS], disturbed=True) == [0]
    assert cycle(predictor, [10 * MS]) == [10 * MS]


def test_a_bubble_that_becomes_shorter_fools_it_once():
    predictor = BubblePredictor(warmup=2)
    for _ in range(20):
        cycle(predictor, [100 * MS])
    assert cycle(predictor, [40 * MS]) == [100 * MS]
    assert cycle(predictor, [40 * MS]) == [40 * MS]


def test_a_bubble_that_becomes_longer_is_followed_after_three():
    predictor = BubblePredictor(warmup=2)
    for _ in range(20):
        cycle(predictor, [40 * MS])
    for _ in range(3):
        assert cycle(predictor, [100 * MS]) == [40 * MS]
    assert cycle(predictor, [100 * MS]) == [100 * MS]


def test_one_long_outlier_changes_nothing():
    predictor = BubblePredictor(warmup=2)
    for _ in range(20):
        cycle(predictor, [40 * MS])
    cycle(predictor, [400 * MS])
    assert cycle(predictor, [40 * MS]) == [40 * MS]


def test_a_ramped_batch_size_has_a_cycle_of_its_own():
    predictor = BubblePredictor(warmup=2)
    for _ in range(5):
        cycle(predictor, [40 * MS])
    assert cycle(predictor, [90 * MS, 20 * MS], CycleKey("1f1b", 8)) == [0, 0]
    assert cycle(predictor, [40 * MS]) == [40 * MS]


@given(st.lists(st.integers(1, 10**9), min_size=6, max_size=80))
def test_the_prediction_is_always_one_of_the_recent_durations(durations):
    predictor = BubblePredictor(warmup=5)
    for duration in durations:
        cycle(predictor, [duration])
    assert cycle(predictor, [1])[0] in durations[-predictor.window :]


@given(st.lists(st.integers(50 * MS, 60 * MS), min_size=40, max_size=40))
def test_noise_is_rarely_overpredicted(durations):
    """With a low quantile of the last 24, at most about that share of steady durations falls below the prediction."""
    predictor = BubblePredictor()
    for duration in durations[:30]:
        cycle(predictor, [duration])
    prediction = cycle(predictor, [durations[30]])[0]
    recent = durations[6:30]
    assert sum(duration < prediction for duration in recent) <= predictor.quantile * len(recent)
