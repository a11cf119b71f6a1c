import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from megatron.fill.report import Report, schema
from megatron.fill.status import Status
from megatron.fill.types import BrakeEvent, BubbleKind, JobRecord, JobState, WorkerRecord
from tests.support.synthetic import MS, report_of, synthetic_run


@pytest.fixture(scope="module")
def report() -> Report:
    ranks, workers, jobs = synthetic_run()
    return report_of(ranks[::-1], workers, jobs, "train --pp 2")


def test_summary(report: Report) -> None:
    summary = report.summary
    assert summary.iterations == 10
    assert summary.bubble_share == pytest.approx(600 / 2008)  # 2 ranks, 30 ms in 10 iterations of 100 or 101 ms
    assert summary.harvest_ratio == pytest.approx((103.6 + 112) / (120 + 140))
    assert summary.fill_efficiency == pytest.approx((0.12 * 224 / 0.12 / 2500 + 0.08 * 128 / 0.08 / 2000) / 0.2)
    assert summary.slowdown is not None
    assert summary.slowdown.mean == pytest.approx(0.01)
    assert summary.slowdown.pairs == 2
    assert summary.open_to_step_us == schema.Percentiles(count=18, p50=100, p99=100, max=100)
    assert summary.overrun_us == schema.Percentiles(count=18, p50=0, p99=2100, max=2100)
    assert [job.name for job in summary.jobs] == ["train", "resize", "graph", "late"]
    assert summary.jobs[0].model_dump() == {
        "name": "train",
        "state": JobState.QUEUED,
        "cause": "training-ended",
        "reason": "the main job ended first",
        "work_done": 224.0,
        "unit": "images",
    }


def test_first_rank(report: Report) -> None:
    rank = report.ranks[0]
    assert (rank.rank, rank.stage, rank.device) == (0, 0, "cpu")
    assert rank.iterations == 10
    assert rank.iteration_s == pytest.approx(1.004)
    assert rank.iteration_time is not None
    assert rank.iteration_time.mean_s == pytest.approx(0.1004)
    assert rank.iteration_time.median_s == pytest.approx(0.1)
    assert rank.iteration_time.p99_s == pytest.approx(0.101)
    assert rank.bubble_s == pytest.approx({"fill": 0, "fwd-bwd": 0.2, "interior": 0.1, "drain": 0})
    assert sum(rank.evaluation_bubble_s.values()) == 0
    assert rank.fillable_s == pytest.approx(0.12)  # 30 ms in 4 iterations
    assert rank.harvested_s == pytest.approx(0.1036)  # 16 + 9.9 ms in 4 iterations
    assert rank.harvest_ratio == pytest.approx(0.1036 / 0.12)
    assert rank.fill_efficiency == pytest.approx((224 / 0.12) / (100 / 0.04))
    assert rank.steps == 28
    assert rank.work == [schema.WorkReport(job="train", work_done=224, unit="images", steps=28, harvested_s=0.1036)]
    assert rank.overrun_us == schema.Percentiles(count=8, p50=1050, p99=2100, max=2100)
    assert rank.paired is not None
    assert rank.paired.on is not None
    assert rank.paired.off is not None
    assert (rank.paired.on.count, rank.paired.off.count) == (4, 4)
    assert (rank.paired.on.median_s, rank.paired.off.median_s) == pytest.approx((0.101, 0.1))
    assert rank.predicted_bubbles == 8
    assert rank.prediction_error_ms == pytest.approx(1.0)


def test_second_rank_counts_evaluation_apart(report: Report) -> None:
    rank = report.ranks[1]
    assert rank.bubble_s == pytest.approx({"fill": 0.1, "fwd-bwd": 0, "interior": 0, "drain": 0.2})
    assert rank.evaluation_bubble_s[BubbleKind.FILL] == pytest.approx(0.02)
    assert rank.bubble_share == pytest.approx(300 / 1004)
    assert rank.fillable_s == pytest.approx(0.14)
    assert rank.harvest_ratio == pytest.approx(0.112 / 0.14)
    assert [(work.job, work.work_done, work.unit) for work in rank.work] == [
        ("resize", 96, "images"),
        ("graph", 128, "edges"),
    ]
    assert rank.predicted_bubbles == 10


def test_jobs_and_total(report: Report) -> None:
    assert report.jobs[0].rate == pytest.approx(224 / 0.1036)
    assert report.jobs[3].rate is None
    assert report.jobs[0].result == {"loss": 0.5}
    assert report.total.iterations == 10
    assert report.total.iteration_s == pytest.approx(2.008)
    assert report.total.steps == 28 + 12 + 16
    assert report.total.fillable_s == pytest.approx(0.26)
    assert len(report.cycle) == 2


def test_json_round_trip(report: Report) -> None:
    text = report.model_dump_json()
    assert Report.model_validate_json(text) == report
    assert json.loads(text)["schema_version"] == schema.SCHEMA_VERSION
    assert "NaN" not in text


def test_the_schema_forbids_what_it_does_not_know(report: Report) -> None:
    content = json.loads(report.model_dump_json())
    content["summary"]["more"] = 1
    with pytest.raises(ValidationError, match="more"):
        Report.model_validate(content)
    with pytest.raises(ValidationError, match="frozen"):
        report.summary.iterations = 3


def test_without_jobs_there_are_no_ratios() -> None:
    ranks = [
        replace(record, bubbles=[replace(bubble, filling=False, predicted_ns=0) for bubble in record.bubbles])
        for record in synthetic_run()[0]
    ]
    summary = report_of(ranks, [], []).summary
    assert summary.harvest_ratio is None
    assert summary.fill_efficiency is None
    assert summary.open_to_step_us is None
    assert summary.overrun_us is None
    assert summary.bubble_share is not None


def test_an_unused_rank_counts_in_the_harvest_ratio() -> None:
    ranks, workers, _ = synthetic_run()
    report = report_of(ranks, workers[:1], [])
    assert report.ranks[1].harvest_ratio == 0.0
    assert report.summary.harvest_ratio == pytest.approx(103.6 / 260)
    assert report.ranks[0].work[0].unit == ""


def test_a_worker_of_an_unknown_rank_counts_nowhere() -> None:
    ranks, workers, jobs = synthetic_run()
    strange = replace(workers[0], rank=9)
    assert report_of(ranks, [*workers, strange], jobs) == report_of(ranks, workers, jobs)


def test_nothing_recorded() -> None:
    ranks = [replace(record, iterations=[], bubbles=[], spans=[]) for record in synthetic_run()[0]]
    for records in ([], ranks):
        report = report_of(records, [], [])
        assert report.summary.bubble_share is None
        assert report.summary.slowdown is None
        assert report.total.iteration_time is None
        assert Report.model_validate_json(report.model_dump_json()) == report


def test_a_broken_off_iteration_has_no_share() -> None:
    ranks, workers, jobs = synthetic_run()
    cut = [replace(record, iterations=record.iterations[:-1]) for record in ranks]
    report = report_of(cut, workers, jobs)
    assert report.ranks[0].bubble_share == pytest.approx(270 / 904)


def test_odd_numbers_of_a_task_do_no_harm() -> None:
    ranks, workers, _ = synthetic_run()
    nan = replace(workers[0], work_done=float("nan"))
    job = JobRecord("train", "m:C", Status(JobState.FAILED, detail="NaN"), float("inf"), "x", total_work=float("inf"))
    job = replace(job, result={"loss": float("nan")})
    report = report_of(ranks, [nan], [job])
    assert report.ranks[0].work[0].work_done == 0
    assert report.ranks[0].fill_efficiency == 0
    assert json.loads(report.model_dump_json())["jobs"][0]["result"] == {"loss": None}


def test_fill_efficiency_of_workers_that_harvested_nothing() -> None:
    ranks, _, _ = synthetic_run()
    idle = WorkerRecord("a", 0, 0, 0.0, 0, 10, 5.0)
    assert report_of(ranks, [idle, replace(idle, job="b")], []).summary.fill_efficiency == 0.0


def test_brakes_are_listed_by_rank() -> None:
    ranks, _, _ = synthetic_run()
    ranks[1] = replace(ranks[1], brakes=[BrakeEvent(4, 0.03, 8, 80, 2 * MS), BrakeEvent(96, 0.5, 2, 224, 4 * MS)])
    report = report_of(ranks, [], [])
    assert report.summary.brakes == 2
    assert report.ranks[0].brakes == []
    assert report.ranks[1].brakes[0] == schema.BrakeReport(iteration=4, slowdown=0.03, pairs=8, until=80, guard_ms=2)
