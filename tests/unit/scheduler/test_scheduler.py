"""Policies: which job runs next."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.agent.ranking import Ranking
from megatron.fill.config import FillSettings
from megatron.fill.errors import ConfigError
from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.planner.held import MARGIN_BYTES
from megatron.fill.planner.search import unit_s
from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, NodeProfile
from megatron.fill.scheduler.policies import DEFAULT_POLICY, MOST_JOBS, POLICIES, STEADY, parse_policy, rank_jobs
from megatron.fill.scheduler.state import DeviceState, JobView, SchedulerState
from megatron.fill.types import BubbleKind
from megatron.fill.work import NewJob, Work
from tests.support.fake_device import free_memory
from tests.support.memory_store import MemoryStore

HERE, THERE = DeviceState("here"), DeviceState("there")


def job(number: int, seconds: float | None = 1.0, submitted_s: float | None = None, **values: object) -> JobView:
    submitted_s = float(number) if submitted_s is None else submitted_s
    view = JobView(number, f"job-{number}", submitted_s, processing_s={"here": seconds})
    return replace(view, **values)  # type: ignore[arg-type]


def state(*jobs: JobView, now_s: float = 0.0, **used_s: float) -> SchedulerState:
    return SchedulerState(now_s, (HERE, THERE), jobs, used_s)


def ranked(policy: str, *jobs: JobView, **values: float) -> list[int]:
    return rank_jobs(parse_policy(policy), state(*jobs, **values), HERE)


seconds = st.none() | st.integers(1, 9).map(float)
drawn_jobs: st.SearchStrategy[list[dict[str, Any]]] = st.lists(
    st.builds(
        dict,
        seconds=seconds | st.just(inf),
        submitted_s=st.integers(0, 3).map(float),
        deadline_s=st.none() | st.integers(0, 30).map(float),
        priority=st.integers(-1, 1),
        user=st.sampled_from(["ada", "bob", ""]),
    ),
    max_size=7,
)
job_sets = drawn_jobs.map(lambda drawn: [job(number, **values) for number, values in enumerate(drawn)])
policies = st.sampled_from([*POLICIES, "0.7*sjf+0.3*deadline", "priority+fair+2*fifo"])


@given(policies, job_sets, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(policy, jobs, source):
    shuffled = source.sample(jobs, len(jobs))
    assert ranked(policy, *jobs, ada=5.0) == ranked(policy, *shuffled, ada=5.0)


@given(policies, job_sets)
def test_every_job_that_may_fit_is_ranked_once(policy, jobs):
    order = ranked(policy, *jobs)
    assert sorted(order) == [its.id for its in jobs if its.processing_s["here"] != inf]


@given(job_sets)
def test_fifo_is_the_order_of_submission(jobs):
    fitting = [its for its in jobs if its.fits(HERE)]
    assert ranked("fifo", *jobs) == [its.id for its in sorted(fitting, key=lambda its: (its.submitted_s, its.id))]


@given(policies, job_sets)
def test_equal_jobs_run_in_the_order_of_submission(policy, jobs):
    alike = [job(its.id, submitted_s=its.submitted_s) for its in jobs]
    assert ranked(policy, *alike) == ranked("fifo", *alike)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_sjf_has_the_least_mean_completion_time_on_one_device(times):
    def total(order):
        done, at = 0, 0
        for number in order:
            at += times[number]
            done += at
        return done

    order = ranked("sjf", *(job(number, float(time)) for number, time in enumerate(times)))
    assert total(order) == min(total(other) for other in permutations(range(len(times))))


def run_preemptively(choose, jobs):
    """One device, units of a second; jobs are (release, time, slack).  Returns whether all deadlines are met."""
    left = {number: time for number, (_, time, _) in enumerate(jobs)}
    deadlines = [release + time + slack for release, time, slack in jobs]
    now = 0
    while left:
        waiting = [number for number in left if jobs[number][0] <= now]
        if waiting:
            number = choose(waiting, left, deadlines, now)
            left[number] -= 1
            if left[number] == 0:
                del left[number]
                if now + 1 > deadlines[number]:
                    return False
        now += 1
    return True


def feasible(jobs):
    """The demand test for preemptive schedules on one device: no interval has more work than time."""
    deadlines = [release + time + slack for release, time, slack in jobs]
    return all(
        sum(time for (release, time, _), due in zip(jobs, deadlines, strict=True) if begin <= release and due <= end)
        <= end - begin
        for begin in {release for release, _, _ in jobs}
        for end in deadlines
        if begin < end
    )


def by_deadline(waiting, left, deadlines, now):
    views = [job(number, float(left[number]), deadline_s=float(deadlines[number])) for number in waiting]
    return ranked("deadline", *views, now_s=float(now))[0]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4), st.integers(0, 8)), min_size=1, max_size=5))
def test_deadlines_are_met_whenever_a_preemptive_schedule_can_meet_them(jobs):
    assert run_preemptively(by_deadline, jobs) == feasible(jobs)


def test_jobs_that_can_make_it_come_before_those_that_cannot():
    late, tight, relaxed, whenever = (
        job(1, 10.0, deadline_s=5.0),
        job(2, 5.0, deadline_s=6.0),
        job(3, 1.0, deadline_s=60.0),
        job(4, 1.0),
    )
    assert ranked("deadline", whenever, late, relaxed, tight) == [2, 3, 1, 4]
    assert ranked("deadline", whenever, late, relaxed, tight, now_s=2.0) == [3, 1, 2, 4]


def test_priority_then_submission_is_the_default():
    jobs = job(1), job(2, priority=5), job(3, priority=5), job(4, priority=-1)
    assert ranked(DEFAULT_POLICY, *jobs) == [2, 3, 1, 4]
    assert FillSettings().policy == DEFAULT_POLICY
    assert FillSettings().memory_margin_mib * 2**20 == MARGIN_BYTES


@given(
    st.lists(st.integers(1, 9), min_size=30, max_size=60),
    st.lists(st.sampled_from(["ada", "bob", "eve"]), min_size=60, max_size=60),
)
@settings(max_examples=30)
def test_fair_share_keeps_users_who_wait_within_one_job_of_each_other(times, users):
    waiting = {number: (float(time), user) for number, (time, user) in enumerate(zip(times, users, strict=False))}
    used = dict.fromkeys(("ada", "bob", "eve"), 0.0)
    while {user for _, user in waiting.values()} == set(used):
        views = [job(number, time, user=user) for number, (time, user) in waiting.items()]
        time, user = waiting.pop(ranked("fair", *views, **used)[0])
        used[user] += time
        assert max(used.values()) - min(used.values()) <= max(times)


def test_makespan_runs_the_longest_job_first_where_it_belongs():
    def on_both(number, here, there):
        return job(number, processing_s={"here": here, "there": there})

    jobs = on_both(1, 3.0, 3.0), on_both(2, 9.0, 9.0), on_both(3, 50.0, 5.0), on_both(4, 8.0, 5.0)
    assert ranked("makespan", *jobs) == [2, 1, 4, 3]
    busy = SchedulerState(0.0, (HERE, DeviceState("there", 100.0)), jobs)
    assert rank_jobs(parse_policy("makespan"), busy, HERE) == [3, 2, 4, 1]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_makespan_is_within_graham_s_bound_of_the_optimum(times):
    """Longest processing time first on two equal devices: at most 4/3 - 1/6 of the best possible."""
    waiting = [job(n, processing_s={"here": float(time), "there": float(time)}) for n, time in enumerate(times)]
    free_s = {"here": 0.0, "there": 0.0}
    while waiting:
        name = min(free_s, key=lambda device: free_s[device])
        devices = tuple(DeviceState(device, busy) for device, busy in free_s.items())
        device = next(its for its in devices if its.name == name)
        chosen = rank_jobs(parse_policy("makespan"), SchedulerState(free_s[name], devices, tuple(waiting)), device)[0]
        free_s[name] += times[chosen]
        waiting = [its for its in waiting if its.id != chosen]
    best = min(
        max(sum(time for bit, time in enumerate(times) if chosen >> bit & 1 == side) for side in (0, 1))
        for chosen in range(2 ** len(times))
    )
    assert max(free_s.values()) <= best * 7 / 6 + 1e-9


def test_an_unknown_time_is_taken_for_the_median():
    jobs = job(1, None), job(2, 1.0), job(3, 4.0), job(4, 9.0), job(5, inf)
    assert ranked("sjf", *jobs) == [2, 1, 3, 4]
    assert state(*jobs).processing_s(jobs[0], HERE) == 4.0
    assert ranked("sjf", job(1, None), job(2, None)) == [1, 2]


def test_a_weighted_sum_adds_places():
    """By time: 1, 2, 3; by priority: 3, 2, 1; the places are 1, 1/2 and 0 however far apart the values are."""
    jobs = job(1, 1.0, priority=0), job(2, 2.0, priority=1), job(3, 900.0, priority=7)
    assert ranked("0.6*sjf+0.4*priority", *jobs) == [1, 2, 3]
    assert ranked("0.4*sjf+0.6*priority", *jobs) == [3, 2, 1]
    assert parse_policy("0.6*sjf+0.4*priority").scores(jobs, state(*jobs), HERE) == pytest.approx([0.6, 0.5, 0.4])


@given(job_sets, st.sampled_from(sorted(POLICIES)))
def test_scaling_the_weights_changes_nothing(jobs, name):
    assert ranked(name, *jobs) == ranked(f"3*{name}", *jobs) == ranked(f"2*{name}+1*{name}", *jobs)


def by_name_length(view: JobView, state: SchedulerState, device: DeviceState) -> float:
    return len(view.name)


def not_a_number(view: JobView, state: SchedulerState, device: DeviceState) -> float:
    return nan


def fails(view: JobView, state: SchedulerState, device: DeviceState) -> float:
    return 1 / 0


def test_one_s_own_function():
    name = f"{__name__}:by_name_length"
    assert ranked(name, job(1), job(10)) == [10, 1]
    assert ranked(f"1*{name}+5*fifo", job(1), job(10)) == [1, 10]
    with pytest.raises(ConfigError, match=r"not_a_number: job 'job-1': score nan; expected a number"):
        ranked(f"{__name__}:not_a_number", job(1))
    with pytest.raises(ConfigError, match=r"fails: job 'job-1': ZeroDivisionError"):
        ranked(f"{__name__}:fails", job(1))


def test_a_sum_has_the_terms_that_are_written():
    sjf, deadline = POLICIES["sjf"], POLICIES["deadline"]
    assert parse_policy("0.7*sjf + deadline").terms == ((0.7, "sjf", sjf), (1.0, "deadline", deadline))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fastest", "policy 'fastest': 'fastest' is none of fifo, sjf"),
        ("", "'' is none of"),
        ("sjf+", "'' is none of"),
        ("x*sjf", "weight 'x'; expected a number above 0"),
        ("-1*sjf", "weight '-1'"),
        ("nan*sjf", "weight 'nan'"),
        ("no_such_module:f", "cannot import no_such_module:f"),
        ("math:no_such_function", "cannot import math:no_such_function"),
        ("math:pi", r"math:pi is 3\.14\d*; expected a function"),
    ],
)
def test_a_wrong_policy_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_policy(text)


def test_times_are_estimated_from_the_plan():
    cycle = BubbleCycle(2_000_000_000, (BubbleSlot(BubbleKind.DRAIN, 10, 5),))
    profile = JobProfile(Configuration(), (NodeProfile("forward", 5, 5),), work=3.0)
    assert unit_s(cycle, [profile]) == pytest.approx(1 / 3)  # two iterations in each cycle of 2 s
    assert unit_s(cycle, [profile], reserve_ns=1) == pytest.approx(2 / 3)
    assert unit_s(cycle, [profile], reserve_ns=6) == inf
    assert unit_s(None, [profile]) is None
    assert unit_s(cycle, []) is None


@given(st.sampled_from(sorted(its.__name__ for its in STEADY)), job_sets)
def test_a_steady_policy_ranks_by_each_job_s_own_score(function, jobs):
    """Whatever else waits, and whenever it is asked."""
    name = next(name for name, its in POLICIES.items() if its.__name__ == function)
    policy = parse_policy(name)
    known = [its for its in jobs if its.processing_s["here"] is not None and its.fits(HERE)]
    scores = {its.id: policy.score_one(its, state(its, now_s=99.0, ada=5.0), HERE)[0] for its in known}
    by_score = sorted(known, key=lambda its: (-scores[its.id], its.submitted_s, its.id))
    assert ranked(name, *known) == [its.id for its in by_score]
    for one in known:
        for other in known:
            slower = replace(one, processing_s={"here": one.processing_s["here"] + 1})
            assert policy.score_one(slower, state(slower), HERE) <= policy.score_one(one, state(one, other), HERE)


@pytest.mark.parametrize(
    ("text", "steady", "built_in"),
    [
        *((name, name in ("fifo", "sjf", "priority"), True) for name in POLICIES),
        ("2*sjf", True, True),
        ("sjf+fifo", False, True),
        (f"{__name__}:by_name_length", False, False),
        (f"sjf+{__name__}:by_name_length", False, False),
    ],
)
def test_what_kind_of_policy_it_is(text, steady, built_in):
    policy = parse_policy(text)
    assert (policy.steady, policy.built_in) == (steady, built_in)
    assert policy.most_jobs == (None if steady else MOST_JOBS)


@pytest.mark.parametrize(
    ("text", "does"),
    [("priority", False), ("0.7*sjf+0.3*deadline", False), ("sjf+fair", True), (f"{__name__}:by_name_length", True)],
)
def test_which_policies_look_at_what_users_have_had(text, does):
    assert parse_policy(text).weighs_users is does


def test_the_score_of_one_job():
    one = job(1, 4.0)
    assert parse_policy("sjf").score_one(one, state(one), HERE) == (-4.0,)
    assert parse_policy("deadline").score_one(one, state(one), HERE) == (0.0, 0.0)
    with pytest.raises(ConfigError, match=r"fails: job 'job-1': ZeroDivisionError"):
        parse_policy(f"{__name__}:fails").score_one(one, state(one), HERE)


def test_the_runtime_weighs_all_jobs_where_the_policy_is_steady():
    """The last of many jobs is the most urgent one."""
    store = MemoryStore()
    spec = Work("m:C")
    many = [NewJob(f"job-{n}", spec, priority=n, deadline_s=1e10 - n) for n in range(MOST_JOBS + 5)]
    store.submit(many)
    first = {}
    for policy in ("priority", "deadline"):
        choice = Ranking(
            parse_policy(policy), "rank 0", "cpu", CycleBoardReader(CycleBoard().reader_fd()), free_memory()
        )
        wanted = choice.wanted(store, None)
        first[policy] = store.get(wanted[0]).name
    assert first == {"priority": f"job-{MOST_JOBS + 4}", "deadline": f"job-{MOST_JOBS - 1}"}
