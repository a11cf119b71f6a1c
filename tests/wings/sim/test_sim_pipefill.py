"""sim_pipefill.py: the arithmetic of its parts on small cases, and that the recorded figures agree."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.planner.held import MARGIN_BYTES
from megatron.fill.types import JobState
from megatron.fill.wings.mainjob.hardware import GIB
from megatron.fill.wings.sim.cluster.rates import Rates
from megatron.fill.wings.sim.values import DeviceGroup, JobOutcome, RuntimeModel, SimJob, SimOutcome
from scripts.benchmarks import sim_pipefill
from scripts.benchmarks.studies import bubbles, pictures, queues, share, tables
from scripts.benchmarks.studies.truth.replay import PlayedIteration, replay
from scripts.benchmarks.studies.truth.steps import StepTimes
from tests.support.clusters import MS, cycle, kind, profile
from tests.wings.sim.test_sim_replay import bubble, opened

ROOT = Path(__file__).parents[3]
RECORDED = json.loads((ROOT / "docs" / "benchmarks" / "pipefill-studies.json").read_text(encoding="utf-8"))
EXACT = RuntimeModel(reserve_ns=0, margin_bytes=0)
TEN_MS = kind("ten", profile(1, 10, 4))  # 100 a second alone
GROUPS = (DeviceGroup("a", 3, cycle((100, 8))), DeviceGroup("b", 1, cycle((300, 8))))


def test_steps_that_are_half_as_fast_in_bubbles_do_half_the_work_and_alone_as_much_as_before():
    slow = Rates(GROUPS[0].cycle, [TEN_MS], replace(EXACT, step_efficiency=0.5))
    fast = Rates(GROUPS[0].cycle, [TEN_MS], EXACT)
    assert fast.resident_rate(fast.whole.fits["ten"]) == 10
    assert slow.resident_rate(slow.whole.fits["ten"]) == 5
    assert bubbles.use(GROUPS, [TEN_MS], EXACT)["gpus_worth"] == pytest.approx(3 * 0.1 + 0.3)
    assert bubbles.use(GROUPS, [TEN_MS], replace(EXACT, step_efficiency=0.5))["gpus_worth"] == pytest.approx(0.3)


def test_harvest_multiplies_the_work():
    found = bubbles.use(GROUPS, [TEN_MS], replace(EXACT, harvest=0.5))
    assert found["gpus_worth"] == pytest.approx(0.3)
    assert found["bubble_share"] == pytest.approx(0.6 / 4)
    assert found["gain"] == pytest.approx(0.3 / 3.4)
    assert found["per_bubble_second"] == pytest.approx(0.5)


def test_stretched_bubbles_make_the_iteration_longer_by_as_much():
    (group,) = bubbles.stretched(GROUPS[:1], 3.0)
    assert [slot.duration_ns for slot in group.cycle.slots] == [300 * MS]
    assert group.cycle.period_ns == 1200 * MS
    assert bubbles.stretched(GROUPS, 1.0) == GROUPS


def test_memory_is_set_in_every_bubble():
    (group,) = bubbles.with_memory((DeviceGroup("a", 1, cycle((10, 1), (20, 5))),), 2)
    assert [slot.free_bytes for slot in group.cycle.slots] == [2 * GIB, 2 * GIB]


def test_a_kind_that_fits_no_bubble_is_worth_nothing_and_one_that_fits_takes_the_best_configuration():
    large = kind("large", profile(1, 10, 9 + MARGIN_BYTES))
    found = bubbles.kind_in_bubbles(GROUPS, large, RuntimeModel())
    assert (found["relative"], found["configuration"], found["devices"]) == (0, None, 0)
    two = kind("two", profile(1, 10, 9, batch=2), profile(1, 10, 4))  # the larger batch is the better one alone
    found = bubbles.kind_in_bubbles(GROUPS, two, EXACT)
    assert (found["configuration_alone"], found["configuration"], found["devices"]) == ("b2", "b1", 4)
    assert found["relative"] == pytest.approx(0.5)


def test_interpolation_is_on_the_line_between_neighbours():
    points = [(400.0, 1.0), (100.0, 0.5), (200.0, 0.6)]
    assert bubbles.interpolated(points, 150.0) == pytest.approx(0.55)
    assert bubbles.interpolated(points, 400.0) == pytest.approx(1.0)
    assert bubbles.interpolated(points, 99.0) is bubbles.interpolated(points, 401.0) is None


@pytest.fixture(scope="module")
def varying():
    return share.Iterations(bubbles.physical_job(microbatches=8), 3, 0.1)


def test_without_delays_the_iterations_are_as_they_were_and_a_delay_never_makes_them_shorter(varying):
    nothing = varying.no_delays()
    before = [timeline.period_ns for timeline in varying.timelines]
    assert [timeline.period_ns for timeline in varying.delayed(nothing)] == before
    nothing[1][0][0] = 10**9  # the first stage's first wait: nobody has a second to spare
    after = [timeline.period_ns for timeline in varying.delayed(nothing)]
    assert (after[0], after[2]) == (before[0], before[2])
    assert before[1] < after[1] <= before[1] + 10**9


def test_a_delay_at_the_end_of_an_iteration_delays_the_next_one(varying):
    delays = varying.no_delays()
    delays[0][0][-1] = 10**9
    before = [timeline.period_ns for timeline in varying.timelines]
    after = [timeline.period_ns for timeline in varying.delayed(delays)]
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] == before[1] + 10**9  # the first stage begins every iteration


def test_bubbles_open_for_a_share_of_their_mean_length_or_not_at_all(varying):
    rows = varying.stage(0)
    assert [row.start_ns for row in rows[1:]] == [
        rows[at].start_ns + varying.timelines[at].period_ns for at in range(len(rows) - 1)
    ]
    found = share.open_shares(rows, 0.5)
    first = [one for one in found.bubbles if one.index == 0]
    mean_ns = sum(one.duration_ns for one in first) / len(first)
    for one in first:
        assert found.told[one.seq].deadline_ns - one.start_ns == pytest.approx(mean_ns / 2, abs=1)
    assert not share.open_shares(rows, 0.0).told
    with_short = share.open_shares([PlayedIteration(1, 0, rows[0].waits)], 1.0, least_ns=10**12)
    assert not with_short.told
    assert len(with_short.bubbles) == len(rows[0].waits)


def test_the_more_of_the_bubbles_is_filled_the_more_work_and_the_later_the_main_job(varying):
    job = bubbles.physical_job(microbatches=8)
    jobs = share.stage_jobs(job, RuntimeModel())
    none, half, over = (share.fill(job, varying, jobs, one) for one in (0.0, 0.5, 1.3))
    assert none["slowdown"] == none["gpus_worth"] == none["fill_tflops"] == 0
    assert 0 < half["gpus_worth"] < over["gpus_worth"] < job.gpus
    assert 0 <= half["slowdown"] < over["slowdown"]
    assert half["harvested_share"] <= 0.5
    predicted = share.fill(job, varying, jobs, None)
    assert predicted["gpus_worth"] == 0  # of three iterations, all are for learning


def test_training_takes_three_times_the_operations_of_inference():
    found = {its.kind.name: its.flops for its in share.stage_jobs(bubbles.physical_job(), RuntimeModel())}
    assert found["bert-base-training"] == 3 * found["bert-base-inference"] > 0


def test_the_share_below_a_slowdown_is_the_last_before_the_first_that_reaches_it():
    rows = [
        {"noise": 0.1, "share": one, "slowdown": slowdown}
        for one, slowdown in ((0.5, 0.0), (0.9, 0.01), (1.0, 0.02), (1.1, 0.0), (None, 0.5))
    ]
    assert share.share_below(rows, 0.1, 0.02) == 0.9
    assert share.share_below(rows, 0.1, 0.6) == 1.1
    assert share.share_below(rows, 0.1, 0.0) is None


def test_a_job_of_nodes_starts_none_that_does_not_fit():
    # 10 ms and 40 ms in turn; of a job whose steps are all alike, the loop would try the long one in the last 20 ms.
    times = StepTimes((10 * MS, 40 * MS), profile_ns=(10 * MS, 40 * MS))
    done = replay(opened([bubble(1, 1000, 1070), bubble(2, 2000, 2070)]), times, preemptive=False)
    assert [(use.steps, use.harvested_ns, use.overrun_ns) for use in done.uses] == [(3, 60 * MS, 0), (2, 50 * MS, 0)]


def test_nodes_come_in_whole_iterations():
    with pytest.raises(ValueError, match="3 steps of a job with 2 nodes"):
        StepTimes((1, 2, 3), profile_ns=(1, 2))


def outcome(*ends: float | None) -> SimOutcome:
    jobs = tuple(
        JobOutcome(n, JobState.QUEUED if end is None else JobState.SUCCEEDED, 0.0, end, 1.0, 1.0, 1)
        for n, end in enumerate(ends)
    )
    return SimOutcome(jobs, (), 1e6, 1, 0, 0.0)


def test_completion_times_are_from_arrival_and_the_makespan_from_the_first():
    jobs = [SimJob(0, "a", "ten", 10.0, 1.0, 25.0), SimJob(1, "b", "ten", 20.0, 1.0, 25.0), SimJob(2, "c", "ten", 5, 1)]
    found = queues.completions(jobs, outcome(20.0, 50.0, None))
    assert (found["jobs"], found["unfinished"]) == (3, 1)
    assert (found["mean_s"], found["median_s"], found["makespan_s"]) == (20.0, 20.0, 45.0)
    assert found["p99_s"] == pytest.approx(29.8)
    assert found["deadlines_met"] == 0.5
    nobody = queues.completions(jobs[2:], outcome(None))
    assert nobody["mean_s"] is nobody["makespan_s"] is nobody["deadlines_met"] is None


def test_all_jobs_of_an_hour_come_at_its_start():
    jobs = [SimJob(n, "a", "ten", arrival_s, 1.0) for n, arrival_s in enumerate((0.0, 3599.0, 3600.0, 9000.0))]
    assert [job.arrival_s for job in queues.by_the_hour(jobs)] == [0.0, 0.0, 3600.0, 7200.0]


def test_figures_of_several_seeds_are_means_and_jobs_are_counted():
    rows = [
        {**dict.fromkeys(queues._MEANS, value), "jobs": 2, "unfinished": 1, "policy": "sjf", "deadlines_met": None}
        for value in (1.0, 3.0)
    ]
    found = queues.mean_row(rows)
    assert (found["mean_s"], found["deadlines_met"], found["jobs"], found["policy"]) == (2.0, None, 4, "sjf")


def test_the_same_load_is_the_same_work_whatever_the_arrivals():
    kinds = [TEN_MS]
    case = queues.Case("sjf", 0.5, replace(queues.SIZES, sigma=0.0, median_s=100.0), queues.DAY_S, EXACT)
    for arrivals in queues.ARRIVALS:
        jobs = queues.made_up(replace(case, arrivals=arrivals), kinds, capacity=4.0)
        seconds = sum(job.work for job in jobs) / TEN_MS.alone_rate
        assert seconds == pytest.approx(0.5 * 4 * queues.DAY_S, rel=0.1)


def test_the_recorded_summary_is_what_the_recorded_parts_make():
    assert json.loads(json.dumps(sim_pipefill.summary(RECORDED))) == RECORDED["summary"]
    assert set(sim_pipefill.PARTS) <= set(RECORDED)
    assert RECORDED["harvest"] == 1.0


@pytest.mark.parametrize("part", sim_pipefill.PARTS)
def test_tables_fit_a_terminal_and_pictures_can_be_drawn(part, tmp_path):
    lines = list(tables.TABLES[part](RECORDED[part]))
    assert max(map(len, lines)) <= 80
    pictures.draw(part, RECORDED[part], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "all"], "invalid choice: 'all'"),
        (["--harvest", "0"], "argument --harvest: '0': expected a number above 0 and up to 1"),
        (["--harvest", "1.1"], "argument --harvest: '1.1': expected a number above 0"),
        (["--step-efficiency", "nan"], "argument --step-efficiency: 'nan': expected a number above 0"),
        (["--efficiency", "much"], "argument --efficiency: 'much': expected a number above 0"),
        (["--json", "none/x.json"], "argument --json: 'none/x.json': expected a file in a folder that is there"),
        (["--png", "none"], "argument --png: 'none': expected a folder that is there"),
        (["--trace", "none.csv"], "argument --trace: none.csv: cannot be read"),
    ],
)
def test_a_wrong_option_is_said_before_anything_runs(arguments, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sim_pipefill.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        sim_pipefill.main()
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_trace_of_ones_own_is_played(tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("arrival,kind,size\n0,bert-base-training,60\n5,bert-base-inference,60\n")
    found = queues.play(queues.Case("sjf", 1.0, queues.PHILLY, 1.0, RuntimeModel(), "trace", trace))
    assert (found["jobs"], found["unfinished"], found["load"]) == (2, 0, None)
    assert found["mean_s"] > 60
