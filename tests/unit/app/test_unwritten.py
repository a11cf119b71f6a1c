"""What a full disk refused to the end is in the table all the same; what was deleted, or is not known, is said."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron.fill.agent.ledger import AttemptLedger
from megatron.fill.errors import FillError
from megatron.fill.pages.lastword import MOST_BYTES, LastWord, Left
from megatron.fill.records.agent import AgentFile, attempts_text, read_agent
from megatron.fill.records.rank import RankWriter, rank_file, read_rank
from megatron.fill.records.segment import OpenSegment, Segment, SegmentEnding
from megatron.fill.records.unwritten import Unwritten
from megatron.fill.report import Report, compose, print_report, profile
from megatron.fill.report.schema import Cycles
from megatron.fill.report.timeuse import TimeUse
from megatron.fill.status import Status
from megatron.fill.types import JobRecord, JobState, RankRecord, WorkerRecord
from tests.support.segments import write_segment
from tests.support.synthetic import synthetic_run
from tests.support.waiting import until

WAIT_S = 20.0


def until_iteration(record: RankRecord, last: int) -> RankRecord:
    return replace(
        record,
        iterations=[one for one in record.iterations if one.iteration <= last],
        bubbles=[one for one in record.bubbles if one.iteration <= last],
        spans=[],
    )


def from_iteration(record: RankRecord, first: int) -> RankRecord:
    return replace(
        record,
        iterations=[one for one in record.iterations if one.iteration >= first],
        bubbles=[one for one in record.bubbles if one.iteration >= first],
        spans=[],
    )


def attempts_of(rank: int) -> list[tuple[JobRecord, WorkerRecord]]:
    _, workers, jobs = synthetic_run()
    by_name = {job.name: job for job in jobs}
    return [(by_name[worker.job], worker) for worker in workers if worker.rank == rank]


def refused(folder: Path, record: RankRecord) -> bytes:
    """What a writer has of a record that no disk takes."""
    (folder / "full").touch()
    writer = RankWriter(folder / "full" / "rank0.jsonl", record.info)
    assert not writer.close(record, WAIT_S)
    return writer.unwritten(MOST_BYTES)


def printed(report: Report) -> str:
    console = Console(file=StringIO(), width=120)
    print_report(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_what_a_full_disk_refused_is_in_the_report(tmp_path):
    ranks, _, _ = synthetic_run()
    write_segment(tmp_path / "whole", ranks, [*attempts_of(0), *attempts_of(1)])
    whole = compose(tmp_path / "whole")
    begun = [until_iteration(record, 4) for record in ranks]
    opened = write_segment(tmp_path / "run", begun, ending=None)
    opened.segment.folder.joinpath("agent0.behind").touch()
    (tmp_path / "run" / "report.json").mkdir()  # nothing can be written there either
    unwritten = {
        rank: Unwritten(
            refused(tmp_path, from_iteration(record, 5)).decode(),
            (attempts_text(attempts_of(rank), MOST_BYTES) or b"").decode(),
        )
        for rank, record in enumerate(ranks)
    }
    shown: list[Report] = []
    with pytest.raises(FillError, match="the report cannot be written there: Is a directory"):
        compose(tmp_path / "run", ended=whole_segment(opened), unwritten=unwritten, show=shown.append)
    [found] = shown
    assert found.total == whole.total
    assert found.summary == whole.summary
    [segment] = found.segments
    assert (segment.ending, segment.iterations, segment.unwritten) == ("by itself", 10, [0, 1])
    assert "the last ones of ranks 0, 1 could not be written; only this has them" in printed(found)
    profile(opened.segment, tmp_path / "bubbles.json", Console(file=StringIO()), unwritten)
    written = Cycles.model_validate_json((tmp_path / "bubbles.json").read_text())
    assert [cycle.training for cycle in written.ranks] == [its.training for its in whole.cycle]


def whole_segment(opened: OpenSegment) -> Segment:
    return replace(opened.segment, ending=SegmentEnding.WELL, ended_s=opened.segment.started_s + 1)


def test_of_a_folder_that_is_gone_the_report_has_what_is_in_memory(tmp_path):
    ranks, _, _ = synthetic_run()
    opened = write_segment(tmp_path / "run", ranks, ending=None)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    left = {0: Unwritten(refused(tmp_path, from_iteration(ranks[0], 5)).decode())}
    report = compose(tmp_path / "run", ended=opened.segment, unwritten=left)
    assert [(rank.rank, rank.iterations) for rank in report.ranks] == [(0, 6)]


def test_a_deleted_record_is_said_once_by_one_rank_and_in_the_table(tmp_path, capfd):
    ranks, _, _ = synthetic_run()
    opened = write_segment(tmp_path, [], ranks=2, ending=None)
    folder = opened.segment.folder
    writers = [RankWriter(rank_file(folder, rank), record.info) for rank, record in enumerate(ranks)]
    for rank, writer in enumerate(writers):
        until(partial(getattr, writer, "ready"))
        writer.add(until_iteration(ranks[rank], 4))
    until(lambda: all(_iterations(folder, rank) == 4 for rank in (0, 1)))
    shutil.rmtree(folder)
    for rank, writer in enumerate(writers):
        writer.add(from_iteration(until_iteration(ranks[rank], 6), 5))
        until(partial(_has_two, folder, rank))
    for rank, writer in enumerate(writers):
        assert writer.close(from_iteration(ranks[rank], 7), WAIT_S)
    [line] = capfd.readouterr().out.splitlines()
    assert line == (
        f"PipeFill: the records in {folder} have been deleted while it trains; what they said of iterations up to 4 is "
        "lost, and not in the report"
    )
    opened.end(whole_segment(opened).ending)
    for job, worker in attempts_of(0):
        AgentFile(folder, 0).add(job, worker)
    report = compose(tmp_path)
    assert report.segments[0].lost_until == 4
    assert [(rank.iterations, rank.harvested_s, rank.harvest_ratio) for rank in report.ranks] == [(6, None, None)] * 2
    assert report.total.harvested_s is None
    text = printed(report)
    assert "deleted while it trained; what was before iteration 5 is lost" in text
    assert "harvest of ranks 0, 1 not known (-) and in no sum: its record up to iteration 4 was deleted" in text


def _has_two(folder: Path, rank: int) -> bool:
    return _iterations(folder, rank) == 2


def _iterations(folder: Path, rank: int) -> int:
    path = rank_file(folder, rank)
    return len(read_rank(path).iterations) if path.exists() else 0


def test_a_harvest_that_an_agent_could_not_write_is_not_known(tmp_path):
    ranks, _, _ = synthetic_run()
    opened = write_segment(tmp_path, ranks, attempts_of(0))
    file = AgentFile(opened.segment.folder, 1)
    file.note(behind=True)
    report = compose(tmp_path)
    known, unknown = report.ranks
    assert unknown.harvested_s is None
    assert unknown.harvest_ratio is None
    assert unknown.time_use_ns[TimeUse.NO_JOB] == 0
    assert unknown.time_use_ns[TimeUse.NOT_KNOWN] > 0
    assert report.total.harvested_s == known.harvested_s
    assert report.summary.harvest_ratio == known.harvest_ratio
    assert "harvest of rank 1 not known (-) and in no sum: its agent could not write what they did" in printed(report)
    file.note(behind=False)
    assert compose(tmp_path).ranks[1].harvested_s == 0


def test_an_agent_leaves_to_its_rank_what_no_disk_took(tmp_path):
    (tmp_path / "full").touch()
    page = LastWord.create()
    ledger = AttemptLedger(AgentFile(tmp_path / "full", 0), page)
    [ended] = attempts_of(0)
    running = replace(ended[0], name="runs", directory="jobs/runs", status=Status(JobState.RUNNING)), ended[1]
    ledger.keep(*ended)
    with ledger.running(lambda: running), pytest.raises(OSError, match="full"):
        ledger.write()
    assert page.state is Left.HERE
    (tmp_path / "left.jsonl").write_bytes(page.read())
    assert read_agent(tmp_path / "left.jsonl") == [(job, replace(worker, steps=[])) for job, worker in (ended, running)]
    (tmp_path / "full").unlink()
    ledger.write()
    assert page.state is Left.NOTHING
    assert page.read() == b""


def test_what_a_dead_agent_could_not_write_stays_lost():
    page = LastWord.create()
    page.succeed()
    assert page.state is Left.NOTHING
    page.leave(b"of the first")
    second = LastWord(page.fd)
    second.succeed()
    second.clear()
    assert page.state is Left.LOST
    second.leave(b"of the second")
    assert (page.state, page.read()) == (Left.LOST, b"")


def test_an_agent_that_is_killed_while_it_leaves_something_leaves_nothing(monkeypatch):
    page = LastWord.create()
    page.leave(b"before")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data, at) if at == 0 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        page.leave(b"half")
    assert (page.state, page.read()) == (Left.LOST, b"")


def test_what_is_too_much_for_the_page_is_lost():
    page = LastWord.create()
    page.leave(bytes(MOST_BYTES + 1))
    assert page.state is Left.LOST
    page = LastWord.create()
    page.leave(bytes(MOST_BYTES))
    assert len(page.read()) == MOST_BYTES


def test_a_message_is_never_longer_than_it_may_be():
    rng = random.Random(0)
    much = "".join(rng.choices("0123456789abcdef", k=20_000))
    whole = Unwritten(seen=much, ended=much[:1000])
    assert Unwritten.unpacked(whole.packed(1 << 20)) == whole
    assert Unwritten.unpacked(whole.packed(2000)) == replace(whole, seen="", cut=True)
    assert len(whole.packed(64)) <= 64
    assert Unwritten.unpacked(whole.packed(64)) == Unwritten(cut=True, lost=True)
    assert not Unwritten()
