"""Why a run filled nothing: each cause by itself, and in every mixture no figure that is not the report's."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron.fill.records.segment import SegmentEnding
from megatron.fill.report import Report, print_report
from megatron.fill.report.advice import Unfilled, advice, cause
from megatron.fill.report.schema import AttemptReport, BrakeReport, JobReport
from megatron.fill.report.terminal import print_cycle
from megatron.fill.report.timeuse import TimeUse
from megatron.fill.types import JobState
from tests.support.synthetic import report_of, synthetic_run

RANKS, WORKERS, JOBS = synthetic_run()
WHOLE = report_of(RANKS, WORKERS, JOBS)


def job(state: JobState = JobState.QUEUED, ready: list[float | None] | None = None) -> JobReport:
    attempts = [
        AttemptReport(segment=1, rank=0, state=state, reason="", ready_s=ready_s, work_done=0, steps=0, harvested_s=0)
        for ready_s in ready or []
    ]
    return WHOLE.jobs[0].model_copy(update={"state": state, "attempts": attempts})


def idle(
    use: dict[TimeUse, int] | None = None,
    jobs: list[JobReport] | None = None,
    fillable_s: float = 0.3,
    braked: bool = False,
    segments: list[dict[str, Any]] | None = None,
    **total: Any,
) -> Report:
    """A run that served jobs and did no step of them."""
    first = WHOLE.segments[0].model_copy(update={"store": "runs/first", "warmup": 5})
    brake = BrakeReport(iteration=7, slowdown=0.1, pairs=2, until=9, guard_ms=1.0)
    return WHOLE.model_copy(
        update={
            "segments": [first.model_copy(update=changed) for changed in segments or [{}]],
            "total": WHOLE.total.model_copy(
                update={
                    "steps": 0,
                    "work": [],
                    "fillable_s": fillable_s,
                    "time_use_ns": dict.fromkeys(TimeUse, 0) | (use or {}),
                }
                | total
            ),
            "jobs": [job(ready=[0.5])] if jobs is None else jobs,
            "ranks": [rank.model_copy(update={"brakes": [brake] if braked else []}) for rank in WHOLE.ranks],
        }
    )


NO_BUBBLES = dict.fromkeys(WHOLE.total.bubble_s, 0.0)
NOTHING: dict[str, Any] = {"iterations": 0, "evaluation_bubble_s": NO_BUBBLES}
ONE_STAGE = report_of([replace(RANKS[0], bubbles=[], info=replace(RANKS[0].info, stages=1))], [], JOBS)


@pytest.mark.parametrize(
    ("report", "found", "said"),
    [
        (idle(**NOTHING), Unfilled.NOTHING_RECORDED, "no rank has written an iteration down"),
        (idle(bubble_s=NO_BUBBLES, fillable_s=0), Unfilled.NO_BUBBLES, "no bubble was seen in 10 iterations"),
        (
            idle(bubble_s=NO_BUBBLES, fillable_s=0).model_copy(update={"stages": ONE_STAGE.stages}),
            Unfilled.ONE_STAGE,
            "in one pipeline stage has no bubbles; --pipeline-model-parallel-size 2",
        ),
        (idle(jobs=[]), Unfilled.NO_JOBS, "pipefill submit JOBS.yaml --store runs/first adds some"),
        (
            idle(fillable_s=0, segments=[{"iterations": 4}, {"iterations": 5}]),
            Unfilled.WARMING_UP,
            "after 5 iterations (warmup_iterations), and of no start of the training more than 5 were recorded",
        ),
        (
            idle(fillable_s=0, iterations=0, predicted_bubbles=0),
            Unfilled.EVALUATED_LITTLE,
            "(--skip-train) has bubbles in evaluations only, which are open to jobs after 5 batches",
        ),
        (idle(fillable_s=0, braked=True), Unfilled.BRAKED, "the automatic brake was on"),
        (idle(fillable_s=0), Unfilled.PAUSED, "pipefill pause or kill was on"),
        (
            idle(jobs=[job(JobState.FAILED, [1.0]), job(JobState.CANCELLED)]),
            Unfilled.FAILED,
            "of 2 jobs none ended well or goes on",
        ),
        (idle(jobs=[job(), job(JobState.FAILED)]), Unfilled.NOT_STARTED, "of 2 jobs none was started"),
        (
            idle({TimeUse.NO_JOB: 9}, [job(ready=[None]), job(ready=[None])]),
            Unfilled.NOT_READY,
            "of 2 attempts none came further than the start of its worker",
        ),
        (
            idle({TimeUse.NO_JOB: 9, TimeUse.LITTLE_TIME: 3, TimeUse.PAST_PREDICTION: 2, TimeUse.LITTLE_MEMORY: 4}),
            Unfilled.LONG_STEPS,
            "The longest bubbles are of 20.0 ms, and steps have to be shorter",
        ),
        (idle({TimeUse.NO_JOB: 9, TimeUse.LITTLE_MEMORY: 4}), Unfilled.LARGE_STEPS, "need more memory"),
        (idle({TimeUse.NO_JOB: 9, TimeUse.RUNTIME: 1}), Unfilled.LATE, "before they got to a step"),
        (
            idle({TimeUse.NO_JOB: 3, TimeUse.TOO_SHORT: 4, TimeUse.PAST_PREDICTION: 3}),
            Unfilled.SHORT_BUBBLES,
            "The longest are of 20.0 ms; the setting min_bubble_us",
        ),
        (idle({TimeUse.NO_JOB: 3, TimeUse.NOT_PREDICTED: 4}), Unfilled.NOT_PREDICTED, "could not be predicted yet"),
        (idle({TimeUse.NO_JOB: 9}), Unfilled.NO_STEP, "jobs had begun, and had no step to run"),
    ],
    ids=lambda value: value.name if isinstance(value, Unfilled) else "",
)
def test_each_cause_is_found_in_what_was_measured_and_said(report, found, said):
    assert cause(report) is found
    assert said in advice(report)
    console = Console(width=80, file=(out := StringIO()))
    print_report(report, console)
    lines = out.getvalue().splitlines()
    assert " ".join(advice(report).split()) in " ".join(out.getvalue().split())
    assert max(map(len, lines)) <= 80


def test_every_cause_is_tested_and_has_a_sentence():
    marks = test_each_cause_is_found_in_what_was_measured_and_said.pytestmark
    assert {case[1] for case in marks[0].args[1]} == set(Unfilled)


def test_a_run_that_filled_something_or_served_no_jobs_is_not_advised():
    assert advice(idle(steps=1)) == ""
    assert advice(WHOLE) == ""
    assert advice(idle(segments=[{"store": ""}])) == ""


def test_what_helps_depends_on_whether_the_training_goes_on():
    going = {"ending": SegmentEnding.RUNNING}
    assert advice(idle(jobs=[job()])).endswith("where it is that no rank was free, a longer training helps")
    assert advice(idle(jobs=[job()], segments=[going])).endswith("the training goes on")
    assert advice(idle(**NOTHING)).endswith("the training was over before")
    assert advice(idle(**NOTHING, segments=[going])).endswith("ask again later")


def test_evaluations_alone_are_advised_as_iterations_are():
    alone = idle({TimeUse.NO_JOB: 9, TimeUse.LITTLE_TIME: 3}, iterations=0)
    assert (cause(alone), "are of 10.0 ms" in advice(alone)) == (Unfilled.LONG_STEPS, True)
    assert cause(idle(fillable_s=0, iterations=0)) is Unfilled.PAUSED
    assert cause(idle(iterations=0, jobs=[job()])) is Unfilled.NOT_STARTED
    one = idle(**NOTHING).model_copy(update={"stages": ONE_STAGE.stages})
    assert cause(one) is Unfilled.ONE_STAGE


def figures(report: Report) -> set[str]:
    """The numbers that a sentence about this report may name."""
    cycles = [cycle.training if report.total.iterations else cycle.evaluation for cycle in report.cycle]
    longest = max((bubble.median_ms for cycle in cycles for bubble in cycle), default=0.0)
    counts = [report.total.iterations, len(report.jobs), sum(len(job.attempts) for job in report.jobs)]
    counts += [count for segment in report.segments for count in (segment.warmup or 0, segment.iterations)]
    return {f"{longest:.1f}", *(f"{count:,}" for count in counts), *map(str, counts)}


uses = st.dictionaries(st.sampled_from(TimeUse), st.integers(0, 10**12))
jobs = st.lists(
    st.builds(job, st.sampled_from(JobState), st.lists(st.none() | st.floats(0, 100), max_size=3)), max_size=3
)
segments = st.lists(
    st.fixed_dictionaries(
        {
            "store": st.sampled_from(["", "runs/first"]),
            "ending": st.sampled_from(SegmentEnding),
            "iterations": st.integers(0, 5000),
            "warmup": st.none() | st.integers(0, 5000),
            "paired_blocks": st.integers(0, 10),
        }
    ),
    min_size=1,
    max_size=3,
)
reports = st.builds(
    idle,
    uses,
    jobs,
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
    segments,
    iterations=st.integers(0, 5000),
    bubble_s=st.sampled_from([NO_BUBBLES, WHOLE.total.bubble_s]),
)


@given(reports)
def test_no_sentence_is_said_twice_and_no_figure_is_another(report):
    text = advice(report)
    assert bool(text) == any(segment.store for segment in report.segments)
    sentences = [part.strip() for part in re.split(r"[;:.,] ", text)]
    assert len(set(sentences)) == len(sentences)
    words = text.replace("runs/first", "").replace("--pipeline-model-parallel-size 2", "")
    assert set(re.findall(r"\d[\d,.]*\d|\d", words)) <= figures(report)


def test_the_slowdown_is_not_said_to_need_a_flag_that_was_given():
    ranks = [replace(rank, iterations=rank.iterations[:2]) for rank in RANKS]
    report = report_of(ranks, [], JOBS)
    segment = report.segments[0].model_copy(update={"paired_blocks": 5})
    for changed, said in ((report, "--fill-paired-blocks measures it"), (segment, "no two blocks of 5 iterations")):
        shown = changed if changed is report else report.model_copy(update={"segments": [segment]})
        console = Console(width=200, file=(out := StringIO()))
        print_report(shown, console)
        assert said in out.getvalue()


def test_a_rank_of_which_nothing_is_known_is_not_said_to_have_no_bubbles():
    report = report_of([replace(RANKS[0], iterations=[], bubbles=[])], [], [])
    console = Console(width=80, file=(out := StringIO()))
    print_cycle(report.cycle, console)
    assert out.getvalue() == "rank 0 (stage 0) has written no iteration down\n"
