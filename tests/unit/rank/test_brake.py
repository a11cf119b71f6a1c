"""The automatic brake, over simulated trainings: a list of noise, and what filling does to each iteration."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.rank.brake import Brake
from megatron.fill.rank.evidence import Evidence, midmean
from megatron.fill.types import fills_block

SECOND = 1_000_000_000
MS = 1_000_000


class Training:
    """One rank's iterations.

    Args:
        slower: how much filling slows an iteration that has this guard (in ns) at this number.
        iteration_ns: without noise and filling.
        settled: number of the iteration before which all jobs have settled.
    """

    def __init__(
        self,
        slower: float | Callable[[int, int], float] = 0.0,
        iteration_ns: int = SECOND,
        first: int = 6,
        settled: int = 0,
        **settings: int,
    ) -> None:
        self.slower = slower if callable(slower) else lambda guard_ns, number: slower
        self.iteration_ns = iteration_ns
        self.first = first
        self.settled = settled
        self.said: list[str] = []
        self.brake = Brake(0.01, 3, say=self.said.append, **settings)
        self.filled: list[bool] = []

    def run(self, noise: np.ndarray, disturbed: Callable[[int], bool] = lambda number: False) -> Training:
        """Go on for one iteration per value of the noise (of the logarithm of its time)."""
        brake = self.brake
        for value in noise:
            number = len(self.filled)
            if number == self.settled:
                brake.jobs_settled()
            on = brake.iteration_started(self.first + number, number)
            factor = math.exp(value) * (1 + on * self.slower(brake.guard_ns, number))
            brake.observe(int(self.iteration_ns * factor), disturbed(number))
            self.filled.append(on)
        return self

    def braked_after(self) -> int | None:
        """Iterations from the first filled one to the first brake."""
        return self.brake.events[0].iteration - self.first if self.brake.events else None


def normal(count: int, seed: int = 0, sigma: float = 0.05) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, sigma, count)


def wandering(count: int, seed: int) -> np.ndarray:
    """Noise that lasts: each iteration's is nine tenths of the one before."""
    values = normal(count, seed, 0.05 * math.sqrt(1 - 0.9**2))
    for at in range(1, count):
        values[at] += 0.9 * values[at - 1]
    return values


def bursts(count: int, seed: int) -> np.ndarray:
    """A neighbour takes 15% for a dozen iterations now and then."""
    random = np.random.default_rng(seed)
    values, at = normal(count, seed), 0
    while at < count:
        at += int(random.exponential(100))
        length = 1 + int(random.exponential(12))
        values[at : at + length] += 0.15
        at += length
    return values


def outliers(count: int, seed: int) -> np.ndarray:
    """One iteration in fifty takes twice as long, or five times."""
    random = np.random.default_rng(seed)
    return normal(count, seed) + (random.random(count) < 0.02) * random.exponential(1.0, count)


@pytest.mark.parametrize("noise", [normal, wandering, bursts, outliers])
def test_noise_alone_brakes_less_than_once_in_ten_thousand_iterations(noise):
    trainings = [Training().run(noise(10_000, seed)) for seed in range(5)]
    assert sum(len(training.brake.events) for training in trainings) <= 5
    # ... and the probes have become rare.
    assert all(np.mean(training.filled[2000:]) > 0.92 for training in trainings)


@pytest.mark.parametrize(
    ("slowdown", "sigma", "median"),
    [(0.5, 0.05, 24), (0.3, 0.05, 32), (0.1, 0.05, 56), (0.03, 0.05, 320), (0.03, 0.01, 48), (0.1, 0.01, 24)],
)
def test_a_slowdown_is_found_the_sooner_the_larger_it_is(slowdown, sigma, median):
    found = [Training(slowdown).run(normal(6000, seed, sigma)).braked_after() for seed in range(15)]
    assert np.median([after for after in found if after is not None]) <= median
    assert None not in found


@given(st.floats(0.1, 2.0), st.integers(0, 2000), st.integers(1_000_000, 100 * SECOND))
@settings(max_examples=30)
def test_a_gross_slowdown_is_found_in_a_few_pairs_at_any_time_and_of_any_iteration(slowdown, begins, iteration_ns):
    training = Training(lambda guard, number: slowdown if number >= begins else 0.0, iteration_ns)
    training.run(normal(begins + 6 * 128, sigma=0.01))
    event = training.brake.events[0]
    assert begins <= event.iteration < begins + 200  # up to 128 to the next probe
    assert event.pairs <= 6


@given(st.floats(0, 0.0099), st.integers(0, 10**6), st.integers(0, 20))
@settings(max_examples=30)
def test_without_noise_nothing_below_the_limit_brakes(slowdown, first, blocks):
    training = Training(slowdown, first=first, paired_blocks=blocks).run(np.zeros(2000))
    assert training.brake.events == []


@given(st.integers(0, 10**6), st.integers(0, 20))
@settings(max_examples=30)
def test_without_noise_whatever_is_above_it_does(first, blocks):
    training = Training(0.011, first=first, paired_blocks=blocks).run(np.zeros(600))
    assert training.brake.events[0].pairs == 2


def test_a_drift_of_the_baseline_is_no_slowdown():
    drift = np.linspace(0, math.log(3), 4000)
    assert Training().run(normal(4000, sigma=0.01) + drift).brake.events == []
    assert Training().run(normal(4000, sigma=0.01) - drift).brake.events == []
    step = np.repeat([0.0, 0.4, 0.0, -0.3], 1000)
    assert Training().run(normal(4000, sigma=0.02) + step).brake.events == []
    assert Training(0.03).run(normal(4000, sigma=0.01) + drift).brake.events


def test_iterations_after_evaluations_and_checkpoints_are_left_out():
    late = np.zeros(4000)
    late[::10] = 1.0
    assert Training().run(normal(4000) + late, lambda number: number % 10 == 0).brake.events == []
    slow = Training(0.3).run(normal(400) + late[:400], lambda number: number % 10 == 0)
    after = slow.braked_after()
    assert after is not None
    assert after <= 96


@given(st.lists(st.booleans(), min_size=200, max_size=600))
@settings(max_examples=20)
def test_what_is_disturbed_counts_nowhere(disturbed):
    noise = np.where(disturbed, 5.0, 0.0)
    assert Training().run(noise, disturbed.__getitem__).brake.events == []


def test_all_ranks_probe_at_the_same_iterations_whatever_their_noise():
    ranks = [Training(first=1001).run(normal(8000, seed)) for seed in range(4)]
    unfilled = [{number for number, on in enumerate(rank.filled) if not on} for rank in ranks]
    assert [rank.brake.events for rank in ranks] == [[]] * 4
    rarest = {number for number in range(8000) if (1001 + number) % 64 == 63}
    for numbers in unfilled:
        # The rare ones are part of the frequent ones.
        assert rarest <= numbers
        assert all((1001 + number) % 4 == 3 for number in numbers)


def test_filling_begins_with_frequent_probes_that_become_rare():
    filled = Training(first=0).run(normal(4096)).filled
    assert np.mean(filled[:20]) == 0.75
    assert np.mean(filled[2048:]) >= 1 - 1 / 16


def test_without_noise_probes_become_rare_with_every_pair_once_the_noise_is_known():
    filled = Training(first=0).run(np.zeros(1024)).filled
    assert [at for at in range(1024) if not filled[at]] == [3, 7, 11, 15, 31, *range(63, 1024, 64)]


@pytest.mark.parametrize(("sigma", "most"), [(0.005, 12), (0.01, 15), (0.02, 23), (0.04, 33)])
def test_probes_take_little_of_the_first_300_iterations(sigma, most):
    # With probes of two iterations it was 15, 19, 29 and 41.
    unfilled = [300 - sum(Training().run(normal(300, seed, sigma)).filled) for seed in range(20)]
    assert np.mean(unfilled) <= most


@pytest.mark.parametrize(
    ("sigma", "slowdown", "median"),
    [(0.005, 0.02, 90), (0.01, 0.05, 60), (0.02, 0.05, 80), (0.02, 0.02, 400), (0.04, 0.05, 160)],
)
def test_a_slowdown_that_begins_later_is_found_soon(sigma, slowdown, median):
    after = []
    for seed in range(25):
        training = Training(lambda guard, number: slowdown * (number >= 700), first=6 + 5 * seed)
        training.run(normal(4000, seed, sigma))
        after.append(training.brake.events[0].iteration - training.first - 700 if training.brake.events else 4000)
    assert np.median(after) < median


def test_before_jobs_settle_probes_become_rare_only_after_five_pairs():
    filled = Training(first=0, settled=1024).run(np.zeros(160)).filled
    assert [at for at in range(160) if not filled[at]] == [7, 15, 23, 31, 39, 47, 63, 79, 95, 111, 127, 159]


def test_what_was_measured_before_jobs_settled_does_not_delay_the_brake():
    for seed in range(10):
        slow = Training(lambda guard_ns, number: 0.02 * (number >= 160), settled=160)
        slow.run(normal(1500, seed, sigma=0.005))
        at_once = Training(0.02).run(normal(1500, seed, sigma=0.005))
        assert slow.brake.events[0].iteration - 160 <= at_once.brake.events[0].iteration + 32


def test_a_slowdown_near_the_limit_keeps_the_probes_frequent():
    def unfilled(slowdown: float) -> int:
        trainings = [Training(slowdown, first=0).run(normal(160, seed, sigma=0.01)) for seed in range(20)]
        return sum(training.filled.count(False) for training in trainings)

    assert unfilled(0.009) > 2 * unfilled(0.0)


@pytest.mark.parametrize(("slowdown", "most"), [(0.03, 500), (0.1, 260)])
def test_a_slowdown_that_begins_when_probes_are_rare_is_found_too(slowdown, most):
    for seed in range(10):
        training = Training(lambda guard_ns, number: slowdown * (number >= 500)).run(normal(3000, seed, sigma=0.01))
        assert 500 <= training.brake.events[0].iteration < 500 + most


def test_a_brake_says_so_and_tries_again_with_a_larger_guard():
    training = Training(0.2, guard_ns=MS).run(np.zeros(330))
    brake, event = training.brake, training.brake.events[0]
    assert training.said[0] == (
        "PipeFill: rank 3 stops filling: the training is 20.0% slower (over 2 pairs, more than --fill-max-slowdown "
        "1%); tries again at iteration 96 with a guard of 4.0 ms"
    )
    assert training.said[1] == "PipeFill: rank 3 fills again from iteration 96, with a guard of 4.0 ms"
    assert (event.iteration, event.until, event.pairs, event.guard_ns) == (22, 96, 2, 4 * MS)
    assert math.isclose(event.slowdown, 0.2, rel_tol=1e-6)
    assert training.filled[22 - 6 + 1 : 96 - 6] == [False] * 73
    # The second time the pause and the guard double; the end of the pause and what followed it were a pair already.
    second = brake.events[1]
    assert (second.iteration, second.until, second.guard_ns) == (106, 240, 7 * MS)
    assert brake.guard_ns == brake.events[2].guard_ns == 13 * MS


def test_the_pause_and_the_guard_are_bounded():
    training = Training(0.2).run(np.zeros(20_000))
    pauses = [event.until - event.iteration - 1 for event in training.brake.events]
    assert pauses[:7] == [73, 133, 261, 517, 1029, 1029, 1029]
    assert training.brake.guard_ns == 16 * 3 * MS


def test_a_larger_guard_may_cure_it_and_is_taken_back_when_all_is_well_for_long():
    training = Training(lambda guard_ns, number: 0.1 if guard_ns < 5 * MS and number < 3000 else 0.0)
    training.run(normal(500, sigma=0.01))
    assert len(training.brake.events) == 2
    assert 5 * MS <= training.brake.guard_ns < 6 * MS
    training.run(normal(8000, 1, sigma=0.01))
    assert training.brake.guard_ns == 0
    assert 2 <= len(training.brake.events) <= 6
    assert np.mean(training.filled[-1024:]) > 0.95


def test_ranks_that_brake_at_different_pairs_of_one_period_fill_again_on_the_common_grid():
    for first in range(16):
        event = Training(0.5, first=first).run(np.zeros(100)).brake.events[0]
        assert event.until % 16 == 0


@pytest.mark.parametrize("blocks", [1, 4, 10])
def test_paired_blocks_are_the_pairs_and_there_are_no_other_probes(blocks):
    quiet = Training(paired_blocks=blocks).run(normal(2000, sigma=0.02))
    assert quiet.filled == [fills_block(number // blocks) for number in range(2000)]
    assert quiet.brake.events == []
    slow = Training(0.2, paired_blocks=blocks).run(normal(2000, sigma=0.02))
    event = slow.brake.events[0]
    assert event.iteration - slow.first < max(30, 6 * blocks)
    assert (event.until - slow.first) % (2 * blocks) == 0
    resumes = event.until - slow.first
    both = range(resumes, resumes + 2 * blocks)
    assert slow.filled[resumes : resumes + 2 * blocks] == [fills_block(number // blocks) for number in both]


class TestEvidence:
    @given(st.lists(st.floats(-10, 10), min_size=1, max_size=20))
    def test_the_midmean_lies_within(self, values):
        assert min(values) - 1e-9 <= midmean(values) <= max(values) + 1e-9

    def test_the_midmean_of_four_does_not_hear_one(self):
        assert midmean([1.0, 1.0, 1.0, 1e9]) == 1.0

    def test_one_pair_is_never_enough(self):
        evidence = Evidence(0.01)
        evidence.add([5.0] * 4, [0.0] * 4, 0.001)
        assert evidence.verdict(0.001) is None

    def test_an_unfilled_iteration_that_is_an_outlier_does_not_hide_a_slowdown(self):
        evidence = Evidence(0.01)
        for change in [0.03] * 10 + [-0.5] + [0.03] * 10:
            evidence.add([change] * 6, [0.0], 0.01)
        measured = evidence.verdict(0.01)
        assert measured is not None
        assert 0.02 < measured[0] < 0.04

    def test_a_slowdown_that_has_just_begun_is_doubted_before_it_shows_in_all_pairs(self):
        evidence = Evidence(0.01)
        for change in [0.0] * 60 + [0.03] * 3:
            evidence.add([change] * 6, [0.0, 0.0], 0.01)
        assert evidence.suspicion(0.01) < -5
        assert evidence.doubt(0.01) > 2

    @given(st.integers(2, 64), st.floats(0.02, 0.5))
    def test_the_measure_is_that_of_the_pairs(self, count, change):
        evidence = Evidence(0.01)
        for _ in range(count):
            evidence.add([change] * 8, [0.0] * 4, 0.0)
        measured = evidence.verdict(0.0)
        assert measured is not None
        assert math.isclose(measured[0], math.expm1(change), rel_tol=1e-9)
        evidence.clear()
        assert evidence.verdict(0.0) is None
