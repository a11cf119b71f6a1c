"""The cluster simulation: completion times worked out by hand, and what holds in every scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import floor, inf

import numpy as np
import pytest
from hypothesis import given, settings

from megatron.fill.errors import ConfigError
from megatron.fill.planner.search import unit_s
from megatron.fill.types import JobState
from megatron.fill.wings.sim.cluster.rates import Rates
from megatron.fill.wings.sim.cluster.simulate import Cluster, simulate
from megatron.fill.wings.sim.values import (
    DeviceGroup,
    Failures,
    FillKind,
    JobOutcome,
    MainJobRun,
    RuntimeModel,
    Scenario,
    SimJob,
    SimOutcome,
)
from tests.support.clusters import any_policy, cycle, kind, profile, scenarios

EXACT = RuntimeModel(reserve_ns=0, margin_bytes=0, start_s=0.5)
TEN = kind("ten", profile(1, 10, 4))  # 10 ms: ten a second in a bubble of 100 ms a second, 100 a second alone
THIRTY = kind("thirty", profile(1, 30, 4))  # three a second there, and 10 ms are left
THREE = kind("three", profile(1, 3, 4))  # 33 a second there, three a second in those 10 ms
LARGE_THREE, LARGE_THIRTY = kind("large three", profile(1, 3, 5)), kind("large thirty", profile(1, 30, 5))
HUGE = kind("huge", profile(1, 10, 99))
BOTH = kind("both", profile(1, 10, 4), profile(1, 10, 6, batch=2))
ASKING = tuple(replace(BOTH, name=f"asks {least}", memory_bytes=least) for least in (5, 6, 9))
ASKING_THIRTY = replace(THIRTY, name="asking thirty", memory_bytes=5)
KINDS = (TEN, THIRTY, THREE, LARGE_THREE, LARGE_THIRTY, HUGE, BOTH, *ASKING, ASKING_THIRTY)


def job(number: int, its_kind: FillKind = TEN, arrival_s: float = 0.0, work: float = 100.0, **values: object) -> SimJob:
    return replace(SimJob(number, f"job-{number}", its_kind.name, arrival_s, work), **values)  # type: ignore[arg-type]


def scenario(*jobs: SimJob, devices: int = 1, policy: str = "fifo", **values: object) -> Scenario:
    main = MainJobRun("llm", (DeviceGroup("llm/stage 0", devices, cycle((100, 8))),))
    base = Scenario((main,), KINDS, jobs, 1000.0, policy, EXACT)
    return replace(base, **values)  # type: ignore[arg-type]


def ends(found: SimOutcome) -> list[float | None]:
    return [its.ended_s for its in found.jobs]


def test_one_device_runs_one_job_after_the_other():
    found = simulate(scenario(job(0), job(1), job(2, arrival_s=50.0)))
    assert ends(found) == pytest.approx([10.5, 21.0, 60.5])
    assert found.jobs[1] == JobOutcome(1, JobState.SUCCEEDED, 10.5, 21.0, 100.0, 10.5, 1)
    group = found.groups[0]
    assert (group.main_s, group.bubble_s, group.down_s) == pytest.approx((1000.0, 100.0, 0.0))
    assert group.resident_s == pytest.approx(31.5)
    assert group.alone_s == pytest.approx(3.0)
    assert found.events == 3 + 2 * 3 + 1  # arrivals, first steps and ends, and the main job's start


def test_harvest_and_reserve_slow_jobs_down():
    assert ends(simulate(scenario(job(0), runtime=replace(EXACT, harvest=0.5)))) == pytest.approx([20.5])
    # 95 ms take nine.
    slower = simulate(scenario(job(0), runtime=replace(EXACT, reserve_ns=5_000_000)))
    assert ends(slower) == pytest.approx([0.5 + 100 / 9])


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fifo", [0, 1, 2]), ("sjf", [1, 2, 0]), ("priority", [2, 0, 1]), ("deadline", [1, 0, 2]), ("fair", [0, 1, 2])],
)
def test_the_policy_has_the_order(policy, order):
    jobs = (
        job(0, work=300.0, user="ada", deadline_s=500.0),
        job(1, work=100.0, user="bob", deadline_s=400.0),
        job(2, work=200.0, user="ada", priority=1),
    )
    found = simulate(scenario(*jobs, policy=policy, runtime=replace(EXACT, tail=False)))
    assert sorted(range(3), key=lambda number: found.jobs[number].started_s or 0.0) == order


def test_the_lowest_idle_device_takes_a_job():
    cluster = Cluster(scenario(job(0), job(1, arrival_s=1.0), devices=3))
    while cluster.step():
        if cluster.now_s == 1.0:
            assert [device.resident is not None for device in cluster.devices] == [True, True, False]


def test_a_tail_job_gets_what_the_resident_job_leaves():
    """From 0.5 on the resident job runs, from 1 to 10.5 the tail job beside it, then alone."""
    jobs = (job(0, THIRTY, work=30.0), job(1, THREE, work=3 * 9.5 + 33 * 2))
    found = simulate(scenario(*jobs))
    assert ends(found) == pytest.approx([10.5, 12.5])
    assert found.jobs[1].started_s == 0.5
    assert found.groups[0].tail_s == pytest.approx(12.0)
    alone = simulate(scenario(*jobs, runtime=replace(EXACT, tail=False)))
    assert alone.groups[0].tail_s == 0.0
    assert alone.jobs[1].started_s == 10.5


def test_a_tail_job_keeps_its_seat_beside_the_next_resident_job():
    jobs = (job(0, THIRTY, work=30.0), job(1, THREE, work=3 * 9.5 + 33 * 1.5 + 3 * 4), job(2, THIRTY, 11.5, work=300.0))
    found = simulate(scenario(*jobs))
    # Alone from 10.5 until the next resident job's first step at 12.
    assert ends(found) == pytest.approx([10.5, 16.0, 112.0])


def test_a_job_gets_the_memory_that_it_asks_for():
    """A plan uses no more, nor does a tail job: of 8 bytes, 3 are left next to one that asks for 5 and needs 4."""
    five, six, nine = ASKING
    found = simulate(scenario(job(0, BOTH), job(1, five, 100.0), job(2, six, 200.0), job(3, nine)))
    assert ends(found) == pytest.approx([5.5, 110.5, 205.5, None])
    assert found.jobs[3].state is JobState.FAILED  # no device has that much
    for resident, beside in ((ASKING_THIRTY, False), (THIRTY, True)):
        found = simulate(scenario(job(0, resident), job(1, THREE)))
        assert (found.groups[0].tail_s > 0.0) is beside


def test_a_job_begins_after_those_that_it_waits_for():
    """Job 1 after 0 and 3, which arrives while the device is idle; job 2 after one that fits no device."""
    jobs = (job(0), job(1, after=(0, 3)), job(2, after=(4,)), job(3, arrival_s=50.0), job(4, HUGE))
    found = simulate(scenario(*jobs))
    assert ends(found) == pytest.approx([10.5, 71.0, None, 60.5, None])
    assert [its.state for its in found.jobs[2:]] == [JobState.QUEUED, JobState.SUCCEEDED, JobState.FAILED]
    with pytest.raises(ValueError, match="job 'job-0': after has 9; expected ids of jobs"):
        scenario(job(0, after=(9,)))


def test_no_tail_job_while_a_device_is_idle():
    found = simulate(scenario(job(0, THIRTY), job(1, THREE), devices=2))
    assert found.groups[0].tail_s == 0.0


def test_a_tail_job_s_memory_must_be_free_beside_the_resident_one():
    found = simulate(scenario(job(0, THIRTY, work=30.0), job(1, LARGE_THREE)))
    assert found.groups[0].tail_s == 0.0
    assert found.jobs[1].started_s == pytest.approx(10.5)


def test_a_resident_job_that_comes_to_a_tail_job_has_less_memory():
    jobs = (job(0, THIRTY, work=30.0), job(1, THREE, work=3 * 9.5 + 33 * 2), job(2, LARGE_THIRTY, 5.0))
    found = simulate(scenario(*jobs))
    assert found.jobs[2].started_s == pytest.approx(12.5)  # not before the tail job has gone


def test_jobs_go_on_where_a_planned_end_left_them():
    first = MainJobRun("first", (DeviceGroup("first", 1, cycle((100, 8))),), 0.0, 5.25)
    second = MainJobRun("second", (DeviceGroup("second", 1, cycle((100, 8))),), 20.0)
    found = simulate(scenario(job(0), main_jobs=(first, second)))
    [its] = found.jobs
    assert (its.id, its.state, its.started_s, its.work_done, its.attempts) == (0, JobState.SUCCEEDED, 0.0, 100.0, 2)
    assert (its.ended_s, its.device_s) == pytest.approx((25.75, 11.0))
    assert [group.main_s for group in found.groups] == [5.25, 980.0]
    assert [group.down_s for group in found.groups] == [0.0, 0.0]
    assert [group.alone_s for group in found.groups] == pytest.approx([0.475, 0.525])


def test_a_job_that_is_done_as_its_main_job_ends_is_done():
    main = MainJobRun("llm", (DeviceGroup("llm", 1, cycle((100, 8))),), 0.0, 10.5)
    assert simulate(scenario(job(0), main_jobs=(main,))).jobs[0].state is JobState.SUCCEEDED


@pytest.mark.parametrize("seed", range(5))
def test_failures_cost_what_was_done_since_the_last_checkpoint(seed):
    mean_s, restart_s, save_s = 40.0, 7.0, 4.0
    runtime = replace(EXACT, checkpoint_s=save_s)
    random = np.random.default_rng([seed, 0])
    now_s, kept, attempts, failures = 0.0, 0.0, 1, 0
    while now_s + 0.5 + (300 - kept) / 10 > (fails_s := now_s + random.exponential(mean_s)):
        kept += 10 * save_s * max(0, floor((fails_s - now_s - 0.5) / save_s))
        now_s, attempts, failures = fails_s + restart_s, attempts + 1, failures + 1
    end_s = now_s + 0.5 + (300 - kept) / 10
    given_ = scenario(job(0, work=300.0), runtime=runtime, failures=Failures(mean_s, restart_s, seed))
    found = simulate(replace(given_, duration_s=end_s + 1e-6))
    assert found.jobs[0].ended_s == pytest.approx(end_s)
    assert (found.jobs[0].attempts, found.failures) == (attempts, failures)
    assert found.groups[0].down_s == pytest.approx(failures * restart_s)


def test_failures_come_as_often_as_they_should():
    """Eight devices with a mean of 4,000 s each, that are up for 500 s between two of them on the average."""
    found = simulate(scenario(devices=8, duration_s=1e6, failures=Failures(4000.0, 500.0, 3)))
    assert found.failures == pytest.approx(1000, rel=0.1)
    assert found.groups[0].main_s == pytest.approx(found.failures * 4000.0, rel=0.1)


def test_a_job_that_fits_nothing_fails_and_harms_nobody():
    found = simulate(scenario(job(0, HUGE), job(1), job(2, HUGE, arrival_s=5000.0)))
    assert [its.state for its in found.jobs] == [JobState.FAILED, JobState.SUCCEEDED, JobState.QUEUED]
    assert found.jobs[1].ended_s == pytest.approx(10.5)


def test_a_job_that_fits_only_some_devices_waits_for_those():
    small = MainJobRun("small", (DeviceGroup("small", 2, cycle((100, 8))),))
    large = MainJobRun("large", (DeviceGroup("large", 1, cycle((100, 99))),), 50.0)
    found = simulate(scenario(job(0, HUGE), job(1), main_jobs=(small, large)))
    assert [its.started_s for its in found.jobs] == [50.0, 0.0]


def test_what_runs_at_the_end_counts_with_what_it_did():
    found = simulate(scenario(job(0), job(1), duration_s=5.5))
    assert found.jobs[0].work_done == pytest.approx(50.0)
    assert replace(found.jobs[0], work_done=50.0) == JobOutcome(0, JobState.RUNNING, 0.0, None, 50.0, 5.5, 1)
    assert found.jobs[1] == JobOutcome(1, JobState.QUEUED, None, None, 0.0, 0.0, 0)
    assert found.groups[0].alone_s == pytest.approx(0.5)


def test_a_policy_s_failure_names_it_and_the_job():
    broken = f"{__name__}:broken"
    with pytest.raises(ConfigError, match=r"broken: job 'job-0': ZeroDivisionError"):
        simulate(scenario(job(0), policy=broken))
    with pytest.raises(ConfigError, match="'fastest' is none of fifo"):
        simulate(scenario(job(0), policy="fastest"))


def broken(*_: object) -> float:
    return 1 / 0


def seen(view: object, state: object, device: object) -> float:
    devices = state.devices  # type: ignore[attr-defined]
    assert {its.name for its in devices} == {f"llm/stage 0/{n}" for n in range(3)}
    return 0.0


def test_a_policy_of_one_s_own_sees_every_device():
    assert simulate(scenario(job(0), devices=3, policy=f"{__name__}:seen")).jobs[0].state is JobState.SUCCEEDED


def test_the_times_that_policies_see_are_the_scheduler_s():
    rates = Rates(cycle((100, 8)), (TEN, THIRTY), EXACT)
    for its in (TEN, THIRTY):
        fit = rates.whole.fits[its.name]
        assert fit.unit_s == pytest.approx(unit_s(rates.cycle, its.profiles))
        assert rates.resident_rate(fit) == pytest.approx(1 / fit.unit_s)


def running(cluster: Cluster) -> list[tuple[int, float]]:
    """Job and rate of every seat that is taken."""
    seats = [seat for device in cluster.devices for seat in (device.resident, device.tail) if seat is not None]
    return [(seat.job, seat.rate) for seat in seats]


def check_seats(cluster: Cluster) -> None:
    """Every running job has one seat, and none stands empty that a waiting job fits."""
    held = [number for number, _ in running(cluster)]
    states = [entry.state for entry in cluster.jobs]
    assert sorted(held) == [number for number, state in enumerate(states) if state is JobState.RUNNING]
    succeeded = {entry.id for entry in cluster.jobs if entry.state is JobState.SUCCEEDED}
    waiting = {
        job.kind
        for job, state in zip(cluster.scenario.jobs, states, strict=True)
        if state is JobState.QUEUED and job.arrival_s <= cluster.now_s and succeeded.issuperset(job.after)
    }
    for device in cluster.devices:
        assert device.up or (device.resident is None and device.tail is None)
        if device.up and device.resident is None:
            beside = None if device.tail is None else device.tail.fit
            assert not waiting & device.rates.resident_offer(beside).fits.keys()
        elif device.resident is not None and device.resident.started_s is not None and device.tail is None:
            tails = device.rates.tail_offer(device.resident.fit).fits.keys()
            assert not (cluster.scenario.runtime.tail and waiting & tails)


def check_sums(given_: Scenario, jobs: Sequence[JobOutcome], cluster: Cluster) -> None:
    groups = [entry.outcome() for entry in cluster.groups]
    kinds = {its.name: its for its in given_.kinds}
    for its, found in zip(given_.jobs, jobs, strict=True):
        assert found.id == its.id
        assert 0 <= found.work_done <= its.work
        assert (found.state is JobState.SUCCEEDED) == (found.work_done == its.work) == (found.ended_s is not None)
        assert (found.attempts > 0) == (found.started_s is not None)
    alone_s = sum(found.work_done / kinds[its.kind].alone_rate for its, found in zip(given_.jobs, jobs, strict=True))
    assert sum(group.alone_s for group in groups) == pytest.approx(alone_s)
    assert sum(group.resident_s + group.tail_s for group in groups) == pytest.approx(sum(its.device_s for its in jobs))
    for group in groups:
        assert max(group.resident_s, group.tail_s) <= group.main_s + 1e-6
        assert group.main_s + group.down_s <= given_.duration_s * group.count + 1e-6


@given(scenarios(any_policy))
@settings(max_examples=120)
def test_what_always_holds(scenario):
    cluster = Cluster(scenario)
    then_s, rates, done = 0.0, running(cluster), 0.0
    going = True
    while going:
        going = cluster.step()
        done += sum(rate for _, rate in rates) * (cluster.now_s - then_s)
        then_s, rates = cluster.now_s, running(cluster)
        if going:
            check_seats(cluster)
    check_sums(scenario, cluster.jobs, cluster)
    counted = sum(its.work_done for its in cluster.jobs)
    if cluster.failures == 0:
        assert done == pytest.approx(counted)
    else:
        assert done >= counted * (1 - 1e-9)


def test_a_wrong_value_is_refused():
    with pytest.raises(ValueError, match="work is 0"):
        job(0, work=0.0)
    with pytest.raises(ValueError, match="arrival_s is nan"):
        job(0, arrival_s=float("nan"))
    with pytest.raises(ValueError, match="job id 0 is there twice"):
        scenario(job(0), job(0))
    with pytest.raises(ValueError, match=r"kind is 'ten'; expected one of three"):
        scenario(job(0), kinds=(THREE,))
    group = DeviceGroup("llm", 1, cycle((100, 8)))
    with pytest.raises(ValueError, match="group 'llm' is there twice"):
        scenario(main_jobs=(MainJobRun("a", (group,)), MainJobRun("b", (group,))))
    with pytest.raises(ValueError, match="duration_s is inf"):
        scenario(duration_s=inf)
