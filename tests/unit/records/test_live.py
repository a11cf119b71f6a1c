"""The live sums against the report's, over records that grow."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.records.agent import write_agent
from megatron.fill.records.live import LiveSegment
from megatron.fill.records.rank import RankWriter, rank_file
from megatron.fill.records.segment import Segment, begin_segment, read_segments
from megatron.fill.records.slowdown import slowdown
from megatron.fill.status import Cause, JobState, Status
from megatron.fill.types import BrakeEvent, Iteration, RankRecord
from tests.support.segments import write_rank
from tests.support.synthetic import LAST, MS, report_of, synthetic_run


def _segment(folder: Path, ranks: int = 2) -> Segment:
    begin_segment(folder, "train", ranks)
    return read_segments(folder)[-1]


def _written(folder: Path) -> LiveSegment:
    ranks, workers, jobs = synthetic_run()
    segment = _segment(folder)
    for record in ranks:
        write_rank(rank_file(segment.folder, record.info.rank), record)
        named = {job.name: job for job in jobs}
        its = [(named[one.job], one) for one in workers if one.rank == record.info.rank]
        write_agent(segment.folder / f"agent{record.info.rank}.jsonl", its)
    return LiveSegment(segment)


def test_the_sums_are_those_of_the_report(tmp_path):
    live = _written(tmp_path)
    live.look()
    report = report_of(*synthetic_run())
    assert live.bubble_share == pytest.approx(report.total.bubble_share)
    assert live.harvest_ratio == pytest.approx(report.total.harvest_ratio)
    assert live.ranks[0].iteration == LAST
    for rank in report.ranks:
        seen = live.ranks[rank.rank]
        assert {kind: ns / 1e9 for kind, ns in seen.bubble_ns.items() if ns} == pytest.approx(
            {kind: s for kind, s in rank.bubble_s.items() if s}
        )
        assert seen.steps == rank.steps
    assert sum(rank.overruns for rank in live.ranks.values()) > 0


@pytest.mark.parametrize("running", [False, True])
def test_the_harvest_leaves_out_the_time_in_which_jobs_settled(tmp_path, running):
    ranks, workers, jobs = synthetic_run()
    settled = [replace(one, settled_after=7) for one in ranks]
    report = report_of(settled, workers, jobs)
    assert report.total.settling_s > 0
    segment = _segment(tmp_path)
    live, named = LiveSegment(segment), {job.name: replace(job, directory=job.name) for job in jobs}
    for records in (ranks, settled):  # as it is before and after jobs have settled
        for record in records:
            number = record.info.rank
            write_rank(rank_file(segment.folder, number), record)
            its = [(named[one.job], one) for one in workers if one.rank == number]
            if records is ranks:
                write_agent(segment.folder / f"agent{number}{'.running' * running}.jsonl", its)
        live.look()
    assert live.harvest_ratio == pytest.approx(report.total.harvest_ratio)


@pytest.mark.parametrize("early", [False, True])
def test_a_late_look_counts_no_harvest_whose_bubbles_it_leaves_out(tmp_path, early):
    ranks, workers, jobs = synthetic_run()
    settled = [replace(one, settled_after=7) for one in ranks]
    segment = _segment(tmp_path)
    named = {job.name: replace(job, directory=job.name) for job in jobs}
    live = LiveSegment(segment)
    cut = [replace(one, uses=list(one.uses)[-2:], older_uses=len(one.uses) - 2) for one in workers]
    for its in [workers, cut] if early else [cut]:  # a log keeps the last uses only
        for record in settled:
            number = record.info.rank
            write_rank(rank_file(segment.folder, number), record)
            running = [(named[one.job], one) for one in its if one.rank == number]
            write_agent(segment.folder / f"agent{number}.running.jsonl", running)
        live.look()
    whole, forgetful = report_of(settled, workers, jobs).total, report_of(settled, cut, jobs).total
    assert whole.settling_s > forgetful.settling_s == 0
    assert forgetful.fillable_s == pytest.approx(whole.fillable_s + whole.settling_s)
    expected = whole if early else forgetful
    assert live.harvest_ratio == pytest.approx(expected.harvest_ratio)


@pytest.mark.parametrize("running", [False, True])
def test_harvest_in_bubbles_that_are_not_recorded_does_not_count(tmp_path, running):
    """Jobs are recorded more often than ranks, and a rank that is killed loses its last bubbles."""
    ranks, workers, jobs = synthetic_run()
    behind = [
        replace(
            record,
            iterations=[one for one in record.iterations if one.iteration <= LAST // 2],
            bubbles=[one for one in record.bubbles if one.iteration <= LAST // 2],
        )
        for record in ranks
    ]
    last = {record.info.rank: max(bubble.seq for bubble in record.bubbles) for record in behind}
    fillable_ns = sum(one.end_ns - one.start_ns for record in behind for one in record.bubbles if one.filling)
    harvested_ns = sum(use.harvested_ns for its in workers for use in its.uses if use.seq <= last[its.rank])
    assert harvested_ns < sum(worker.harvested_ns for worker in workers)
    assert report_of(behind, workers, jobs).total.harvest_ratio == pytest.approx(harvested_ns / fillable_ns)

    segment, named = _segment(tmp_path), {job.name: replace(job, directory=job.name) for job in jobs}
    for record in behind:
        number = record.info.rank
        write_rank(rank_file(segment.folder, number), record)
        its = [(named[one.job], one) for one in workers if one.rank == number]
        write_agent(segment.folder / f"agent{number}{'.running' * running}.jsonl", its)
    live = LiveSegment(segment)
    live.look()
    assert live.harvest_ratio == pytest.approx(harvested_ns / fillable_ns)
    for record in ranks:
        write_rank(rank_file(segment.folder, record.info.rank), record)
    live.look()
    assert live.harvest_ratio == pytest.approx(report_of(ranks, workers, jobs).total.harvest_ratio)


def test_a_second_look_adds_nothing_that_was_there(tmp_path):
    live = _written(tmp_path)
    live.look()
    before = repr(live.ranks)
    live.look()
    assert repr(live.ranks) == before


def test_only_the_new_lines_are_read(tmp_path):
    ranks, _, _ = synthetic_run()
    segment = _segment(tmp_path)
    whole = ranks[0]
    writer = RankWriter(rank_file(segment.folder, 0), whole.info)
    live = LiveSegment(segment)
    for begin in (0, 5):
        its = [one for one in whole.iterations if begin < one.iteration <= begin + 5]
        part = replace(whole, iterations=its, bubbles=[], spans=[])
        while not writer.ready:
            pass
        writer.add(part)
        while live.ranks.get(0) is None or live.ranks[0].iterations < begin + 5:
            live.look()
    assert writer.close(RankRecord(whole.info, [], [], []), 5)
    live.look()
    assert [one.iteration for one in live.ranks[0].recent] == list(range(1, LAST + 1))


def test_a_shortened_record_keeps_its_sums_and_those_of_its_jobs(tmp_path):
    live = _written(tmp_path)
    live.look()
    before = live.ranks[0]
    shared, overruns = live.bubble_share, before.overruns
    path = rank_file(live._segment.folder, 0)
    write_rank(path, synthetic_run()[0][0])  # another file
    live.look()
    assert live.ranks[0] is not before
    assert (live.bubble_share, live.ranks[0].overruns) == (shared, overruns)


def test_a_cut_line_waits_for_its_rest(tmp_path):
    ranks, _, _ = synthetic_run()
    segment = _segment(tmp_path)
    path = rank_file(segment.folder, 0)
    write_rank(path, ranks[0])
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    live = LiveSegment(segment)
    live.look()
    with path.open("ab") as file:
        file.write(data[-20:])
    live.look()
    assert live.ranks[0].iterations == LAST


def test_what_runs_counts_and_is_not_counted_again_at_its_end(tmp_path):
    ranks, workers, jobs = synthetic_run()
    segment = _segment(tmp_path)
    write_rank(rank_file(segment.folder, 0), ranks[0])
    running = segment.folder / "agent0.running.jsonl"
    write_agent(running, [(jobs[0], workers[0])])
    live = LiveSegment(segment)
    live.look()
    harvested, overruns = live.ranks[0].harvested_ns, live.ranks[0].overruns
    assert harvested == workers[0].harvested_ns
    assert [job.name for job, _ in live.ranks[0].running] == ["train"]
    ended = replace(jobs[0], status=Status(JobState.SUCCEEDED, Cause.NONE))
    write_agent(segment.folder / "agent0.jsonl", [(ended, workers[0])])
    live.look()
    assert (live.ranks[0].harvested_ns, live.ranks[0].overruns, live.jobs_done) == (harvested, overruns, 1)
    assert live.ranks[0].running == []


def test_other_nodes_are_left_out_and_brakes_are_read(tmp_path):
    ranks, _, _ = synthetic_run()
    segment = _segment(tmp_path)
    far = replace(ranks[1], info=replace(ranks[1].info, node=1))
    near = replace(ranks[0], brakes=[BrakeEvent(5, 0.03, 8, 69, MS)])
    for record in (near, far):
        write_rank(rank_file(segment.folder, record.info.rank), record)
    live = LiveSegment(segment, nodes=[0])
    live.look()
    assert list(live.ranks) == [0]
    assert live.ranks[0].brakes == near.brakes


def test_nothing_is_known_of_a_run_without_records(tmp_path):
    live = LiveSegment(_segment(tmp_path))
    live.look()
    assert math.isnan(live.bubble_share)
    assert math.isnan(live.harvest_ratio)
    assert live.slowdown is None
    assert live.jobs_done == 0


def _line(number: int, ms: float, filling: bool, block: int = -1) -> Iteration:
    return Iteration(number, 0, int(ms * MS), filling, block)


def test_probes_are_compared_with_their_neighbours():
    its = [_line(n, 100 if n % 16 < 4 else 103, n % 16 >= 4) for n in range(200)]
    found = slowdown(its)
    assert found is not None
    assert found.mean == pytest.approx(0.03)
    assert found.low == pytest.approx(0.03)
    assert found.pairs == 12


def test_a_long_stop_is_no_probe():
    its = [_line(n, 100 if n % 128 < 64 else 103, n % 128 >= 64) for n in range(1500)]
    assert slowdown(its) is None


def test_blocks_are_compared_in_pairs():
    its = [_line(n, (102 + n % 3) if n // 5 % 2 == 0 else 100, n // 5 % 2 == 0, n // 5) for n in range(60)]
    found = slowdown(its)
    assert found is not None
    assert found.low <= found.mean <= found.high
    assert 0.02 < found.mean < 0.04
    assert found.pairs == 6
