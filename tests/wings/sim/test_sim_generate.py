"""Generated jobs: their distributions are as documented."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.planner.held import MARGIN_BYTES
from megatron.fill.wings.sim.filljobs.generate import Generator, fill_capacity, generate
from megatron.fill.wings.sim.values import DeviceGroup, RuntimeModel
from tests.support.clusters import cycle, kind, profile

DAY_S = 86400.0
FAST = kind("fast", profile(1, 10, 4))  # 100 a second alone
SLOW = kind("slow", profile(1, 100, 4))  # 10 a second alone; fits no bubble below
KINDS = (FAST, SLOW)
GROUPS = (
    DeviceGroup("a", 3, cycle((95, 8 + MARGIN_BYTES))),
    DeviceGroup("b", 2, cycle((50, 8 + MARGIN_BYTES))),
    DeviceGroup("c", 9, cycle((50, 1 + MARGIN_BYTES))),
)
RATES = {its.name: its.alone_rate for its in KINDS}

generators = st.builds(
    Generator,
    jobs=st.integers(1, 200),
    kinds=st.sampled_from([{}, {"fast": 1.0}, {"slow": 2.0, "fast": 0.5}]),
    median_s=st.floats(1, 1e4),
    sigma=st.sampled_from([0.0, 1.0, 2.0]),
    cap_s=st.sampled_from([inf, 100.0, 5000.0]),
    daily=st.sampled_from([0.0, 0.5, 1.0]),
    deadline_share=st.sampled_from([0.0, 0.5, 1.0]),
    users=st.sampled_from([0, 1, 7]),
    seed=st.integers(0, 99),
)


@given(generators, st.sampled_from([10.0, DAY_S, 10 * DAY_S]))
@settings(max_examples=80)
def test_every_job_is_as_asked_for(generator, duration_s):
    jobs = generate(generator, KINDS, duration_s)
    assert jobs == generate(generator, KINDS, duration_s)
    assert [job.id for job in jobs] == list(range(generator.jobs))
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    for job in jobs:
        size_s = job.work / RATES[job.kind]
        assert 0 <= job.arrival_s < duration_s
        assert 0 < size_s <= generator.cap_s * (1 + 1e-9)
        assert not generator.kinds or job.kind in generator.kinds
        assert bool(job.user) == bool(generator.users)
        if job.deadline_s is not None:
            least, most = generator.deadline_factors
            assert least * size_s <= (job.deadline_s - job.arrival_s) * (1 + 1e-6) + 1e-6
            assert job.deadline_s - job.arrival_s <= most * size_s * (1 + 1e-6) + 1e-6
    urgent = sum(job.deadline_s is not None for job in jobs)
    if generator.deadline_share in (0.0, 1.0):
        assert urgent == generator.deadline_share * len(jobs)


def test_another_seed_makes_other_jobs():
    generator = Generator(jobs=20)
    assert generate(generator, KINDS, 100.0) != generate(replace(generator, seed=1), KINDS, 100.0)


@pytest.mark.parametrize("cap_s", [inf, 1000.0, 300.0])
def test_sizes_have_their_median_and_mean(cap_s):
    generator = Generator(jobs=40_000, median_s=600.0, sigma=1.0, cap_s=cap_s)
    sizes = [job.work / RATES[job.kind] for job in generate(generator, KINDS, 100.0)]
    assert median(sizes) == pytest.approx(min(600.0, cap_s), rel=0.03)
    assert sum(sizes) / len(sizes) == pytest.approx(generator.mean_s, rel=0.03)


def test_kinds_and_users_have_their_weights():
    generator = Generator(jobs=20_000, kinds={"fast": 3.0, "slow": 1.0}, users=3, user_skew=1.0)
    jobs = generate(generator, KINDS, 100.0)
    assert sum(job.kind == "fast" for job in jobs) == pytest.approx(15_000, rel=0.03)
    counts = [sum(job.user == f"user-{n}" for job in jobs) for n in (1, 2, 3)]
    assert counts == pytest.approx([20_000 * 6 / 11 / n for n in (1, 2, 3)], rel=0.06)


@pytest.mark.parametrize("daily", [0.0, 0.8])
def test_the_rate_and_its_daily_cycle(daily):
    generator = Generator(per_hour=1000.0, daily=daily, peak_s=12 * 3600.0)
    assert len(generate(generator, KINDS, 2 * DAY_S)) == pytest.approx(48_000, rel=0.03)
    assert generator.rhythm_s(DAY_S) == pytest.approx(DAY_S)
    morning = generate(generator, KINDS, 6 * 3600.0)  # the quiet quarter of the day
    assert len(morning) == pytest.approx(1000 * generator.rhythm_s(6 * 3600.0) / 3600, rel=0.1)
    jobs = generate(generator, KINDS, DAY_S)
    noon = sum(9 * 3600 <= job.arrival_s < 15 * 3600 for job in jobs) / len(jobs)
    # A quarter of the day around the peak: 1/4 + daily / (pi sqrt 2).
    assert noon == pytest.approx(0.25 + daily * 0.2251, rel=0.06)


def test_a_kind_that_is_slow_in_bubbles_takes_more_of_a_device():
    # In 100 ms with a bubble of 95, ``fast`` does 0.09 of its rate alone, and the other one node of 60 ms: 0.06.
    long = kind("long", profile(1, 60, 4))
    exact, group = RuntimeModel(reserve_ns=0), GROUPS[:1]
    done = [fill_capacity(group, [its], runtime=exact) / 3 for its in (FAST, long)]
    capacity = fill_capacity(group, [FAST, long], {"fast": 3.0, "long": 1.0}, exact)
    assert capacity == pytest.approx(3 / (0.75 / done[0] + 0.25 / done[1]))


def test_load_is_a_share_of_what_the_fleet_can_do():
    exact = RuntimeModel(reserve_ns=0)
    # Group a does 9 nodes a second, of 100 alone; b does 5; nothing fits c.
    capacity = fill_capacity(GROUPS, KINDS, {"fast": 1.0}, exact)
    assert capacity == pytest.approx(3 * 0.09 + 2 * 0.05)
    assert fill_capacity(GROUPS, KINDS, runtime=exact) == pytest.approx(capacity)
    generator = Generator(load=0.8, kinds={"fast": 1.0}, median_s=5.0, sigma=0.5)
    sizes_s = sum(job.work / RATES[job.kind] for job in generate(generator, KINDS, 1e5, GROUPS))
    assert sizes_s / 1e5 == pytest.approx(0.8 * fill_capacity(GROUPS, KINDS, {"fast": 1.0}), rel=0.08)
    half = generate(generator, KINDS, 1e5, GROUPS, RuntimeModel(harvest=0.5))
    assert len(half) == pytest.approx(len(generate(generator, KINDS, 1e5, GROUPS)) / 2, rel=0.08)
    with pytest.raises(ValueError, match="load: no kind fits"):
        generate(Generator(load=0.8, kinds={"slow": 1.0}), KINDS, 1e5, GROUPS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of jobs, per_hour and load; got 0"),
        ({"jobs": 1, "load": 0.5}, "got 2"),
        ({"jobs": 0}, "is 0; expected a number above 0"),
        ({"per_hour": inf}, "is inf"),
        ({"jobs": 1, "kinds": {"fast": -1.0}}, "weight of 'fast' is -1"),
        ({"jobs": 1, "median_s": 0.0}, "median_s is 0"),
        ({"jobs": 1, "sigma": -1.0}, "sigma is -1"),
        ({"jobs": 1, "daily": 1.5}, "daily is 1.5; expected 0 to 1"),
        ({"jobs": 1, "deadline_factors": (3.0, 2.0)}, "deadline_factors is"),
        ({"jobs": 1, "deadline_share": 2.0}, "deadline_share is 2"),
        ({"jobs": 1, "users": -1}, "users is -1"),
    ],
)
def test_a_wrong_value_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Generator(**values)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kinds has 'quick'; expected some of fast, slow"):
        generate(Generator(jobs=1, kinds={"quick": 1.0}), KINDS, 100.0)
