from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.predictor import BubblePredictor
from megatron.fill.types import BubbleKind, CycleKey

TRAINING = CycleKey("1f1b", 4)
EVALUATION = CycleKey("1f1b", 4, forward_only=True)
MS = 1_000_000


def cycle(
    predictor: BubblePredictor,
    durations: list[int],
    key: CycleKey = TRAINING,
    disturbed: bool = False,
    before: int = 10 * MS,
) -> list[int]:
    """Run one cycle, with ``before`` ns of compute ahead of each bubble; what was predicted for each bubble."""
    now_ns = 10**12
    predictor.cycle_started(key, now_ns, disturbed)
    predictions = []
    for index, duration in enumerate(durations):
        now_ns += before
        predictions.append(predictor.predict(BubbleKind.INTERIOR, index, now_ns))
        predictor.observe(BubbleKind.INTERIOR, index, now_ns, now_ns + duration)
        now_ns += duration
    return predictions


def test_nothing_is_predicted_before_the_warmup():
    predictor = BubblePredictor(warmup=3)
    assert [cycle(predictor, [10 * MS, 5 * MS]) for _ in range(4)] == [[0, 0], [0, 0], [0, 0], [10 * MS, 5 * MS]]


def test_a_kind_that_does_not_match_is_not_predicted_and_starts_over():
    predictor = BubblePredictor(warmup=1)
    cycle(predictor, [10 * MS])
    predictor.cycle_started(TRAINING, 0)
    assert predictor.predict(BubbleKind.FILL, 0, 0) == 0
    predictor.observe(BubbleKind.FILL, 0, 0, 3 * MS)
    predictor.cycle_started(TRAINING, 0)
    assert predictor.predict(BubbleKind.FILL, 0, 0) == 3 * MS


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
    for _ in range(10):
        assert cycle(predictor, [40 * MS])[0] <= 40 * MS


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


def test_an_end_that_is_steady_from_the_last_meeting_is_told_from_there():
    """This rank's compute varies by 20 ms, the other rank's by nothing: the bubble ends 100 ms after the last one."""
    predictor = BubblePredictor()
    noise = random.Random(0)
    for _ in range(30):
        before = noise.randint(20 * MS, 40 * MS)
        cycle(predictor, [100 * MS - before], before=before)
    for before in (20 * MS, 33 * MS, 40 * MS):
        assert cycle(predictor, [100 * MS - before], before=before) == [100 * MS - before]


def test_a_length_that_is_steady_from_its_own_opening_is_told_from_there():
    predictor = BubblePredictor()
    noise = random.Random(0)
    for _ in range(30):
        cycle(predictor, [70 * MS], before=noise.randint(20 * MS, 40 * MS))
    assert cycle(predictor, [70 * MS], before=5 * MS) == [70 * MS]


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=80))
def test_a_prediction_is_never_longer_than_the_recent_bubbles(durations):
    predictor = BubblePredictor(warmup=5)
    for duration in durations:
        cycle(predictor, [duration])
    prediction = cycle(predictor, [1])[0]
    assert 0 <= prediction <= max(durations[-predictor.window :])


@given(st.integers(0, 2**32))
def test_steady_noise_is_rarely_overpredicted(seed):
    """Of bubbles of 170 +- 6 ms, one in twelve at most ends before it was predicted to."""
    noise = random.Random(seed)
    predictor = BubblePredictor()
    caught = 0
    for number in range(300):
        duration = round(noise.gauss(170, 6) * MS)
        prediction = cycle(predictor, [duration])[0]
        caught += number >= 50 and prediction > duration
    assert caught <= 250 / 12


def test_the_expected_cycle_leaves_rare_bubbles_out():
    predictor = BubblePredictor(warmup=4)
    for iteration in range(6):
        predictor.cycle_started(CycleKey("1f1b", 4), 0)
        assert (predictor.expected() == []) == (iteration < 4)
        predictor.observe(BubbleKind.FILL, 0, 0, 100)
        predictor.observe(BubbleKind.DRAIN, 1, 200, 250)
        if iteration == 2:
            predictor.observe(BubbleKind.DRAIN, 2, 260, 261)
    assert predictor.expected() == [(BubbleKind.FILL, 100), (BubbleKind.DRAIN, 50)]


def test_reaching_fills_as_long_as_the_longest_recent_bubble():
    cautious, reaching = BubblePredictor(warmup=2), BubblePredictor(warmup=2, reaching=True)
    for predictor in (cautious, reaching):
        for duration in (10 * MS, 14 * MS, 10 * MS, 10 * MS):
            cycle(predictor, [duration])
        predictor.cycle_started(TRAINING, 0)
        assert predictor.predict(BubbleKind.INTERIOR, 0, 10 * MS) == 10 * MS
    assert cautious.fill_for(0, 10 * MS) == 10 * MS
    assert reaching.fill_for(0, 10 * MS) == 14 * MS
    assert reaching.fill_for(0, 20 * MS) == 20 * MS
    assert reaching.fill_for(0, 0) == 0  # what is not predicted is not filled
