from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.rank.predictor import BubblePredictor, Forecast
from megatron.fill.rank.rule import FillRule
from megatron.fill.types import BubbleKind, CycleKey

TRAINING = CycleKey("1f1b", 4)
EVALUATION = CycleKey("1f1b", 4, forward_only=True)
MS = 1_000_000


def cycle(
    predictor: BubblePredictor,
    durations: list[int],
    key: CycleKey = TRAINING,
    after: frozenset[str] = frozenset(),
    before: int = 10 * MS,
) -> list[int]:
    """Run one cycle, with ``before`` ns of compute ahead of each bubble; what was predicted for each bubble."""
    now_ns = 10**12
    predictor.cycle_started(key, now_ns, after)
    predictions = []
    for index, duration in enumerate(durations):
        now_ns += before
        predictions.append(predictor.forecast(BubbleKind.INTERIOR, index, now_ns).shortest_ns)
        predictor.observe(BubbleKind.INTERIOR, index, now_ns, now_ns + duration)
        now_ns += duration
    return predictions


def test_nothing_is_predicted_before_the_warmup():
    predictor = BubblePredictor(FillRule(warmup=3))
    assert [cycle(predictor, [10 * MS, 5 * MS]) for _ in range(4)] == [[0, 0], [0, 0], [0, 0], [10 * MS, 5 * MS]]


def test_a_kind_that_does_not_match_is_not_predicted_and_starts_over():
    predictor = BubblePredictor(FillRule(warmup=1))
    cycle(predictor, [10 * MS])
    predictor.cycle_started(TRAINING, 0)
    assert predictor.forecast(BubbleKind.FILL, 0, 0).shortest_ns == 0
    predictor.observe(BubbleKind.FILL, 0, 0, 3 * MS)
    predictor.cycle_started(TRAINING, 0)
    assert predictor.forecast(BubbleKind.FILL, 0, 0).shortest_ns == 3 * MS


def test_evaluation_does_not_teach_training():
    predictor = BubblePredictor(FillRule(warmup=2))
    for _ in range(3):
        cycle(predictor, [10 * MS])
    for _ in range(5):
        cycle(predictor, [1 * MS], EVALUATION)
    assert cycle(predictor, [10 * MS]) == [10 * MS]


SAVED, EVALUATED = frozenset({"checkpoint"}), frozenset({"evaluation"})


def test_a_disturbed_cycle_is_learnt_from_apart():
    predictor = BubblePredictor(FillRule(warmup=2))
    for _ in range(3):
        cycle(predictor, [10 * MS])
    assert [cycle(predictor, [of_ms * MS], after=SAVED) for of_ms in (500, 6, 8)] == [[0], [0], [0]]
    assert cycle(predictor, [10 * MS], after=EVALUATED) == [0]
    assert cycle(predictor, [10 * MS]) == [10 * MS]
    assert [cycle(predictor, [500 * MS], after=SAVED) for _ in range(3)] == [[6 * MS]] * 3
    assert cycle(predictor, [10 * MS]) == [10 * MS]


def test_after_a_save_the_shortest_of_the_last_five_counts_but_never_more_than_usually():
    predictor = BubblePredictor(FillRule(warmup=2))
    for of_ms in (6, 500, 500, 500, 500, 500):
        cycle(predictor, [of_ms * MS], after=SAVED)
    assert cycle(predictor, [500 * MS], after=SAVED) == [0]  # what is usual is not known
    for _ in range(3):
        cycle(predictor, [10 * MS])
    assert cycle(predictor, [500 * MS], after=SAVED) == [10 * MS]


def test_no_step_may_run_on_after_a_bubble_of_a_disturbed_cycle():
    predictor = BubblePredictor(FillRule(warmup=2, overrun=0.1))
    for after in (frozenset(), SAVED):
        for _ in range(5):
            cycle(predictor, [10 * MS], after=after)
    predictor.cycle_started(TRAINING, 0, SAVED)
    assert predictor.forecast(BubbleKind.INTERIOR, 0, 10 * MS) == Forecast(10 * MS, fills=True)
    assert predictor.forecast(BubbleKind.DRAIN, 0, 10 * MS) == Forecast()


def test_a_bubble_that_becomes_shorter_fools_it_once():
    predictor = BubblePredictor(FillRule(warmup=2))
    for _ in range(20):
        cycle(predictor, [100 * MS])
    assert cycle(predictor, [40 * MS]) == [100 * MS]
    for _ in range(10):
        assert cycle(predictor, [40 * MS])[0] <= 40 * MS


def test_a_bubble_that_becomes_longer_is_followed_after_three():
    predictor = BubblePredictor(FillRule(warmup=2))
    for _ in range(20):
        cycle(predictor, [40 * MS])
    for _ in range(3):
        assert cycle(predictor, [100 * MS]) == [40 * MS]
    assert cycle(predictor, [100 * MS]) == [100 * MS]


def test_bubbles_that_are_spread_widely_are_not_taken_for_a_change():
    predictor = BubblePredictor(FillRule(warmup=2))
    noise = random.Random(0)
    for _ in range(200):
        cycle(predictor, [noise.choice([1, 5, 50]) * MS])
    assert len(predictor._cycle.histories[0].from_opening.ordered) == predictor.rule.window


def test_one_long_outlier_changes_nothing():
    predictor = BubblePredictor(FillRule(warmup=2))
    for _ in range(20):
        cycle(predictor, [40 * MS])
    cycle(predictor, [400 * MS])
    assert cycle(predictor, [40 * MS]) == [40 * MS]


def test_a_ramped_batch_size_has_a_cycle_of_its_own():
    predictor = BubblePredictor(FillRule(warmup=2))
    for _ in range(5):
        cycle(predictor, [40 * MS])
    assert cycle(predictor, [90 * MS, 20 * MS], CycleKey("1f1b", 8)) == [0, 0]
    assert cycle(predictor, [40 * MS]) == [40 * MS]


def test_an_end_that_is_steady_from_the_last_meeting_is_told_from_there():
    """This rank's compute varies by 20 ms, the other rank's by nothing: the bubble ends 100 ms after the last one."""
    predictor = BubblePredictor(FillRule())
    noise = random.Random(0)
    for _ in range(30):
        before = noise.randint(20 * MS, 40 * MS)
        cycle(predictor, [100 * MS - before], before=before)
    for before in (20 * MS, 33 * MS, 40 * MS):
        assert cycle(predictor, [100 * MS - before], before=before) == [100 * MS - before]


def test_a_length_that_is_steady_from_its_own_opening_is_told_from_there():
    predictor = BubblePredictor(FillRule())
    noise = random.Random(0)
    for _ in range(30):
        cycle(predictor, [70 * MS], before=noise.randint(20 * MS, 40 * MS))
    assert cycle(predictor, [70 * MS], before=5 * MS) == [70 * MS]


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=80))
def test_a_prediction_is_never_longer_than_the_recent_bubbles(durations):
    predictor = BubblePredictor(FillRule(warmup=5))
    for duration in durations:
        cycle(predictor, [duration])
    prediction = cycle(predictor, [1])[0]
    assert 0 <= prediction <= max(durations[-predictor.rule.window :])


@given(st.integers(0, 2**32))
def test_steady_noise_is_rarely_overpredicted(seed):
    """Of bubbles of 170 +- 6 ms, one in twelve at most ends before it was predicted to."""
    noise = random.Random(seed)
    predictor = BubblePredictor(FillRule())
    caught = 0
    for number in range(300):
        duration = round(noise.gauss(170, 6) * MS)
        prediction = cycle(predictor, [duration])[0]
        caught += number >= 50 and prediction > duration
    assert caught <= 250 / 12


def test_the_expected_cycle_leaves_rare_bubbles_out():
    predictor = BubblePredictor(FillRule(warmup=4))
    for iteration in range(6):
        predictor.cycle_started(CycleKey("1f1b", 4), 0)
        assert (predictor.expected() == []) == (iteration < 4)
        predictor.observe(BubbleKind.FILL, 0, 0, 100)
        predictor.observe(BubbleKind.DRAIN, 1, 200, 250)
        if iteration == 2:
            predictor.observe(BubbleKind.DRAIN, 2, 260, 261)
    assert predictor.expected() == [(BubbleKind.FILL, 100), (BubbleKind.DRAIN, 50)]


def test_the_ends_are_those_of_the_recent_bubbles_in_eight_equal_parts():
    predictor = BubblePredictor(FillRule(warmup=2))
    assert predictor.forecast(BubbleKind.INTERIOR, 0, 0) == Forecast()
    for duration in (5, 1, 9, 3, 7, 2, 8, 4, 6):
        cycle(predictor, [duration * MS])
    predictor.cycle_started(TRAINING, 0)
    assert predictor.forecast(BubbleKind.INTERIOR, 0, 10 * MS).ends_ns == tuple(n * MS for n in range(2, 10))


def test_after_a_sudden_short_bubble_nothing_is_said_beyond_it():
    predictor = BubblePredictor(FillRule(warmup=2))
    for duration in (50, 50, 50, 50, 20):
        cycle(predictor, [duration * MS])
    predictor.cycle_started(TRAINING, 0)
    forecast = predictor.forecast(BubbleKind.INTERIOR, 0, 10 * MS)
    assert (forecast.shortest_ns, forecast.ends_ns) == (5 * MS, ())  # the shortest, less half a spread


def turns(predictor: BubblePredictor, *durations_ms: float, count: int, period_ms: int = 1000) -> list[Forecast]:
    """Run cycles that begin one period after the other, every second one with bubbles of 1.1 times the duration.

    Returns:
        What is said in the last one, which is left open.
    """
    for number in range(count):
        now_ns = number * period_ms * MS
        predictor.cycle_started(TRAINING, now_ns)
        said = []
        for index, duration in enumerate(durations_ms):
            said.append(predictor.forecast(BubbleKind.INTERIOR, index, now_ns))
            end_ns = now_ns + int(duration * (1 + number % 2 / 10) * MS)
            predictor.observe(BubbleKind.INTERIOR, index, now_ns, end_ns)
            now_ns = end_ns
    return said


def test_the_stretches_that_gain_most_may_catch_the_longest_steps_whichever_bubble_they_are_of():
    predictor = BubblePredictor(FillRule(warmup=2, overrun=0.01, margin=0.0, window=9))
    for number in range(20):
        # One that ends evenly between 10 and 90 ms, one that ends after 50 ms in one of nine cases, and a short one.
        lasts = (10 * (number % 9) + 10, 50 if number % 9 == 8 else 1 + number % 9 / 10, 0.1)
        now_ns = number * 1000 * MS
        predictor.cycle_started(TRAINING, now_ns)
        said = []
        for index, ms in enumerate(lasts):
            said.append(predictor.forecast(BubbleKind.INTERIOR, index, now_ns))
            predictor.observe(BubbleKind.INTERIOR, index, now_ns, now_ns + int(ms * MS))
            now_ns += int(ms * MS)
    assert [one.fills for one in said] == [True, True, False]
    even, long, short = ([step / MS for step in one.steps_ns] for one in said)
    # Of 1000 ms, 8 ms: half a step in the eighth of the cases that ends in a stretch.  The first stretch gains its
    # 10 ms in fifteen of sixteen cases, and so on; that of the long bubble 48 ms in one of sixteen.
    gains = [10.0 * part for part in range(15, 0, -2)]
    best = sorted([*gains, 48.3], reverse=True)
    expected = [min(8 * 16 / (best.index(gain) + 1), gain) for gain in gains]
    assert even == pytest.approx(expected)
    assert long[7] == pytest.approx(8 * 16 / (best.index(48.3) + 1))
    assert max(long[:7]) < 2  # of each 0.1 ms
    assert short == []  # not worth filling


def test_after_a_cycle_with_few_predicted_bubbles_no_longer_steps_may_be_caught():
    predictor = BubblePredictor(FillRule(warmup=2, overrun=0.01, margin=0.0, window=9))
    said: dict[int, list[Forecast]] = {}
    for number in range(22):
        now_ns = number * 1000 * MS
        predictor.cycle_started(TRAINING, now_ns)
        for index in range(1 if number == 20 else 20):
            said.setdefault(number, []).append(predictor.forecast(BubbleKind.INTERIOR, index, now_ns))
            duration_ns = (10 * (number % 9) + 10) * MS
            predictor.observe(BubbleKind.INTERIOR, index, now_ns, now_ns + duration_ns)
            now_ns += duration_ns
    assert max(said[21][0].steps_ns) <= 1.5 * max(said[19][0].steps_ns)


def test_once_overruns_may_cost_nothing_no_step_may_be_caught():
    predictor = BubblePredictor(FillRule(warmup=2, overrun=0.01))
    assert all(one.steps_ns for one in turns(predictor, 100, 20, count=6))
    predictor.overrun = 0.0
    assert {one.steps_ns for one in turns(predictor, 100, 20, count=6)} == {()}


def test_what_steps_may_be_caught_is_known_after_a_whole_cycle():
    predictor = BubblePredictor(FillRule(warmup=2))
    assert [one.steps_ns for one in turns(predictor, 100, 20, count=3)] == [(), ()]
    assert all(len(one.steps_ns) == 8 for one in turns(predictor, 100, 20, count=2))


def test_a_cycle_that_is_disturbed_does_not_change_what_steps_may_be_caught():
    predictor = BubblePredictor(FillRule(warmup=2))
    before = [one.steps_ns for one in turns(predictor, 100, 20, count=6)]
    cycle(predictor, [100 * MS, 20 * MS], after=SAVED)
    assert [one.steps_ns for one in turns(predictor, 100, 20, count=2)] == before


def test_a_bubble_that_is_mostly_short_and_sometimes_long_is_worth_filling_if_an_overrun_may_cost_something():
    for overrun, fills in ((0.01, True), (0.0, False)):
        predictor = BubblePredictor(FillRule(warmup=2, overrun=overrun))
        for number in range(16):
            predictor.cycle_started(TRAINING, number * 1000 * MS)
            said = predictor.forecast(BubbleKind.INTERIOR, 0, number * 1000 * MS)
            predictor.observe(BubbleKind.INTERIOR, 0, 0, 100 * MS if number % 4 == 0 else MS // 10)
        assert said.shortest_ns < MS
        assert said.fills is fills
