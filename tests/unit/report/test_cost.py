"""FreeRide's metrics, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.fill.report.cost import cost_of
from megatron.fill.report.part import JobWork
from megatron.fill.report.schema import Cost, JobReport, Slowdown
from megatron.fill.report.terminal import cost_lines
from megatron.fill.status import Status
from megatron.fill.types import Iteration, JobRecord, JobState, Prices
from tests.support.synthetic import MS, report_of, synthetic_run

PRICES = Prices(main=4.0, side=0.5)
SLOW = Slowdown(mean=0.25, ci95=(0.0, 0.5), pairs=3)
DONE = {
    "a": JobWork(work=600.0, steps=6, harvested_ns=1),
    "b": JobWork(work=90.0, steps=1, alone_work=30.0, alone_ns=10**10),
}


def job(name: str, side_throughput: float | None = None) -> JobReport:
    record = JobRecord(name, "m:C", Status(JobState.QUEUED), 0.0, "steps", side_throughput=side_throughput)
    return report_of([], [], [record]).jobs[0]


def cost(**changed: object) -> Cost:
    given: dict = {"with_s": 100.0, "slowdown": SLOW, "done": DONE, "jobs": [job("a", 12.0)], "prices": PRICES}
    return cost_of(**given | changed)


def test_freerides_formulas():
    found = cost()
    assert (found.with_s, found.without_s, found.time_increase) == (100.0, 80.0, 0.25)
    # a: 600 / 12 = 50 s of a side device; b: 90 / (30 in 10 s) = 30 s.
    assert [(its.job, its.throughput, its.measured, its.side_s) for its in found.work] == [
        ("a", 12.0, False, 50.0),
        ("b", 3.0, True, 30.0),
    ]
    assert found.saving == pytest.approx((80 * 0.5 - 20 * 4) / (80 * 4))
    # Without a slowdown the same work was done beside 100 s, and with one of 0.5 beside 66.7 s.
    assert found.saving_ci95 == pytest.approx(((80 * 0.5 * 1.5 / 400) - 0.5, 80 * 0.5 / 400))
    assert found.lacking == []


def test_without_overhead_it_is_what_the_artifact_prints_of_single_tasks():
    none = Slowdown(mean=0.0, ci95=(0.0, 0.0), pairs=1)
    assert cost(slowdown=none).saving == pytest.approx(80 * 0.5 / (100 * 4))


def test_side_work_of_more_worth_than_the_training_turns_the_interval_round():
    found = cost(prices=Prices(main=1.0, side=10.0))
    assert found.saving_ci95 == pytest.approx((8.0, 8.0 * 1.5 - 0.5))


@pytest.mark.parametrize(
    ("changed", "lacking"),
    [
        ({"prices": None}, ["prices (pipefill report --price"]),
        ({"slowdown": None}, ["the slowdown (--fill-paired-blocks)"]),
        ({"with_s": 0.0}, ["iterations with filling"]),
        (
            {"jobs": []},
            ["the throughput of a (side_throughput in the jobs file, or the setting baseline_seconds)"],
        ),
        ({"jobs": [], "prices": None, "slowdown": None}, ["prices", "the slowdown", "the throughput of a"]),
        (
            {"done": {name: JobWork(work=1.0) for name in "vwxyz"}, "jobs": [job("w", 1.0)]},
            ["the throughput of v, x, y, ... ("],
        ),
    ],
)
def test_what_is_missing_is_said_and_nothing_is_made_up(changed: dict, lacking: list[str]):
    found = cost(**changed)
    assert (found.saving, found.saving_ci95) == (None, None)
    assert len(found.lacking) == len(lacking)
    [*_, line] = cost_lines(found)
    assert line.startswith("cost saving: not known, for lack of ")
    for part, whole in zip(lacking, found.lacking, strict=True):
        assert whole.startswith(part)
        assert part in line


def test_a_job_that_did_nothing_needs_no_throughput():
    assert cost(done={**DONE, "idle": JobWork()}).saving == cost().saving


def test_in_a_report_the_time_goes_from_an_iteration_with_filling_to_the_next_one():
    ranks, workers, jobs = synthetic_run()
    jobs = [replace(one, side_throughput=100.0) for one in jobs]
    found = report_of(ranks, workers, jobs, prices=PRICES).cost
    assert found.with_s == pytest.approx(4 * 0.101)
    assert found.without_s == pytest.approx(0.4)
    side_s = (224 + 96 + 128) / 100
    assert found.saving == pytest.approx(side_s * 0.5 / (0.4 * 4) - 0.01)
    assert found.prices is not None
    # An evaluation of a second after iteration 4, which is with filling, and one after 6, which is not.
    later = [
        replace(
            record,
            iterations=[
                Iteration(
                    its.iteration,
                    its.start_ns + 1000 * MS * (its.iteration > 4) + 1000 * MS * (its.iteration > 6),
                    its.end_ns + 1000 * MS * (its.iteration > 4) + 1000 * MS * (its.iteration > 6),
                    its.filling,
                    its.block,
                )
                for its in record.iterations
            ],
        )
        for record in ranks
    ]
    assert report_of(later, workers, jobs).cost.with_s == pytest.approx(4 * 0.101 + 1)
