"""Runs compared with what is predicted of them, where the truth is known: the runs are simulated themselves."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron.fill.errors import FillError
from megatron.fill.pipeline.costs import PipelineCosts
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.pipeline.timeline import Compiled, Timeline, Wait
from megatron.fill.rank.rule import FillRule
from megatron.fill.status import Status
from megatron.fill.types import CycleKey, Iteration, JobRecord, JobState, RankRecord, WorkerRecord
from scripts.benchmarks.studies.truth.compare import Run, compare, load, select
from scripts.benchmarks.studies.truth.replay import PlayedIteration, open_bubbles, replay
from scripts.benchmarks.studies.truth.steps import StepTimes
from scripts.benchmarks.studies.truth.table import WAYS, summary, table
from tests.support.recorded_runs import MS, noisy, records
from tests.support.segments import write_segment

SCHEDULE = make_schedule("1f1b", 2, 4)
RULE = FillRule()
STEP_NS, WAKE_NS = 2 * MS, MS // 8


def steady(count: int) -> list[Timeline]:
    costs = PipelineCosts.uniform(2, 10 * MS, 20 * MS, p2p_ns=MS // 4, reduce_ns=MS, optimizer_ns=3 * MS)
    return [Compiled(SCHEDULE, rendezvous=True).run(costs)] * count


def filled(made: list[RankRecord]) -> tuple[list[RankRecord], list[WorkerRecord]]:
    """The records with filling on and off in blocks of one iteration, and a worker for each rank."""
    ranks, workers = [], []
    for rank, record in enumerate(made):
        iterations = [
            Iteration(one.iteration, one.start_ns, one.end_ns, block >= 0 and block % 2 == 0, block)
            for one, block in zip(record.iterations, range(-RULE.warmup, len(record.iterations)), strict=False)
        ]
        played = [
            PlayedIteration(
                one.iteration,
                one.start_ns,
                [
                    Wait(b.kind, b.start_ns - one.start_ns, b.end_ns - one.start_ns)
                    for b in record.bubbles
                    if b.iteration == one.iteration
                ],
                one.filling,
            )
            for one in iterations
        ]
        opened = open_bubbles(played, CycleKey("1f1b", 4), RULE)
        bubbles = list(opened.bubbles)
        done = replay(opened, StepTimes((STEP_NS,), (WAKE_NS,)))
        of_seq = {bubble.seq: bubble for bubble in bubbles}
        steps = []
        for use in done.uses:
            begin_ns = of_seq[use.seq].start_ns + use.latency_ns
            steps += [(begin_ns + at * STEP_NS, begin_ns + (at + 1) * STEP_NS) for at in range(use.steps)]
        count = sum(use.steps for use in done.uses)
        harvested_ns = sum(use.harvested_ns for use in done.uses)
        workers.append(WorkerRecord(f"job{rank}", rank, count, 8.0 * count, harvested_ns, 0, 0.0, done.uses, steps))
        ranks.append(replace(record, iterations=iterations, bubbles=bubbles))
    return ranks, workers


def steady_run() -> Run:
    return select(SCHEDULE, RULE, *filled(records(SCHEDULE, steady(40), [MS, MS])))


def test_of_a_run_without_noise_everything_is_predicted() -> None:
    figures = {figure.name: figure for figure in compare(steady_run(), repeats=1)}
    for name in ("iteration", "bubbles", "harvest", "harvest job0", "work job1"):
        for way in WAYS:
            assert figures[name].error[way] == pytest.approx(0, abs=1e-6), (name, way)
        assert figures[name].noise == pytest.approx(0, abs=1e-9)
    # 20 ms of fwd-bwd and 10 of interior bubbles on rank 0; 10 of fill and 20 of drain bubbles on rank 1; and the rest.
    assert figures["bubbles fill"].measured == pytest.approx(0.010, abs=0.001)
    assert figures["bubbles fwd-bwd"].measured == pytest.approx(0.020, abs=0.001)
    assert list(figures)[:2] == ["iteration", "bubbles"]


def test_what_is_predicted_from_the_same_iterations_has_no_noise() -> None:
    run = select(SCHEDULE, RULE, *filled(records(SCHEDULE, noisy(SCHEDULE, 60, 3), [MS, MS])))
    figures = {figure.name: figure for figure in compare(run, repeats=1)}
    assert figures["iteration"].error["same"] == pytest.approx(0, abs=1e-4)
    assert figures["bubbles"].error["same"] == pytest.approx(0, abs=1e-3)
    assert figures["harvest"].error["same"] == pytest.approx(0, abs=0.03)
    for figure in figures.values():
        assert abs(figure.error["profile"]) < 0.03 + 2 * figure.noise, figure
    assert figures["iteration"].ci95 > 0


def test_a_small_kind_of_bubbles_is_compared_with_the_iteration() -> None:
    schedule = make_schedule("gpipe", 2, 4)
    costs = PipelineCosts.uniform(2, 10 * MS, 20 * MS, p2p_ns=MS // 10, reduce_ns=MS, optimizer_ns=3 * MS)
    timeline = Compiled(schedule, rendezvous=True).run(costs)
    run = select(schedule, RULE, *filled(records(schedule, [timeline] * 40, [MS, MS])))
    figures = {figure.name: figure for figure in compare(run, repeats=1)}
    assert [name for name, figure in figures.items() if figure.small] == ["bubbles interior"]
    assert 0 < figures["bubbles interior"].measured < 0.01 * 2 * figures["iteration"].measured


def test_a_slower_half_shows() -> None:
    timelines = steady(40)
    slow = [Compiled(SCHEDULE, rendezvous=True).run(timelines[0].costs.slowed(0, 1.1))]
    # Blocks 0, 4, 8, ... are the even half of those with filling.
    mixed = [slow[0] if at >= 5 and (at - 5) % 4 == 0 else one for at, one in enumerate(timelines)]
    run = select(SCHEDULE, RULE, *filled(records(SCHEDULE, mixed, [MS, MS])))
    iteration = next(figure for figure in compare(run, repeats=1) if figure.name == "iteration")
    assert -0.12 < iteration.halves < -0.05
    assert iteration.error["same"] == pytest.approx(0, abs=1e-6)
    assert iteration.error["profile"] < -0.02  # the blocks without filling were all of the fast ones


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    ranks, workers = filled(records(SCHEDULE, steady(30), [MS, MS]))
    attempts = [(JobRecord(one.job, "m:C", Status(JobState.QUEUED), 0.0, "", one.rank), one) for one in workers]
    write_segment(tmp_path, ranks, attempts)
    with pytest.raises(FillError, match=r"run\.json"):
        load(tmp_path)
    what = {"rule": asdict(RULE)}
    (tmp_path / "run.json").write_text(json.dumps(what), encoding="utf-8")
    run = load(tmp_path)
    assert (run.schedule, run.rule, run.ranks) == (SCHEDULE, RULE, ranks)
    # In half of the iterations there is filling; the first of them is where the jobs begin.
    assert run.window == list(range(8, 31, 2))
    write_segment(tmp_path, ranks, attempts[:1])
    with pytest.raises(FillError, match="expected one on each"):
        load(tmp_path)


def test_too_short_a_run_is_refused() -> None:
    with pytest.raises(FillError, match="too few blocks"):
        select(SCHEDULE, RULE, *filled(records(SCHEDULE, steady(12), [MS, MS])))


def test_only_iterations_whose_steps_are_recorded_count() -> None:
    made, workers = filled(records(SCHEDULE, steady(40), [MS, MS]))
    kept = len(workers[0].steps) // 2
    began_ns = workers[0].steps[-kept][0]
    last = [workers[0].steps[-kept:], workers[1].steps]
    run = select(SCHEDULE, RULE, made, [replace(one, steps=steps) for one, steps in zip(workers, last, strict=True)])
    assert run.window
    starts = {item.iteration: item.start_ns for item in made[0].iterations}
    assert all(starts[number] > began_ns for number in run.window)
    assert run.window[0] > select(SCHEDULE, RULE, made, workers).window[0]


def test_the_table_and_the_summary_have_every_figure() -> None:
    figures = compare(steady_run(), repeats=1)
    lines = table({"a run": figures}).splitlines()
    assert len(lines) == 2 + len(figures)
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    found = summary({"a run": figures})
    assert set(found) == set(WAYS)
    assert found["same"]["figures"] == found["same"]["within_3_percent"] == len(figures)
