"""The files that ranks and agents write while a training runs, and what can be read of them at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.errors import FillError
from megatron.fill.rank.recorder import WRITE_EVERY, Recorder
from megatron.fill.records.agent import AgentFile, read_agent, write_agent
from megatron.fill.records.files import NothingRecorded, append
from megatron.fill.records.rank import RankWriter, add_up, read_rank
from megatron.fill.records.segment import SegmentEnding, begin_segment, last_segment, read_segments
from megatron.fill.records.tables import Table, column
from megatron.fill.status import Status
from megatron.fill.types import BrakeEvent, Bubble, BubbleKind, CycleKey, JobRecord, JobState, RankRecord, WorkerRecord
from tests.support.children import Child
from tests.support.segments import write_rank, write_segment
from tests.support.synthetic import MS, synthetic_run
from tests.support.waiting import until

_IMPORTED_S = time.time()

WAIT_S = 20.0


def attempts_of(workers: list[WorkerRecord], jobs: list[JobRecord]) -> list[tuple[JobRecord, WorkerRecord]]:
    by_name = {job.name: job for job in jobs}
    return [(by_name[worker.job], worker) for worker in workers]


# --- what is written is what is read


def test_rank_round_trip(tmp_path: Path) -> None:
    for record in synthetic_run()[0]:
        record = replace(record, schedule=CycleKey("1f1b", 2), brakes=[BrakeEvent(4, 0.031, 8, 80, 2_000_000)])
        path = tmp_path / "1" / f"rank{record.info.rank}.jsonl"
        write_rank(path, record)
        read = read_rank(path)
        assert read == record
        assert all(type(bubble.kind) is BubbleKind for bubble in read.bubbles)
        without = read_rank(path, spans=False)
        assert without == replace(record, spans=[])


def test_agent_round_trip(tmp_path: Path) -> None:
    _, workers, jobs = synthetic_run()
    attempts = attempts_of(workers, jobs)
    path = tmp_path / "agent0.jsonl"
    write_agent(path, attempts)
    assert read_agent(path) == attempts
    assert type(read_agent(path)[0][0].state) is JobState
    assert [worker for _, worker in read_agent(path, steps=False)] == [replace(one, steps=()) for one in workers]
    write_agent(path, [])
    assert read_agent(path) == []


def test_a_result_that_json_lacks_is_kept_as_text(tmp_path: Path) -> None:
    job = JobRecord("a", "m:C", Status(JobState.SUCCEEDED), 1.0, "images", result={"at": Path("x/y")})
    write_agent(tmp_path / "agent0.jsonl", [(job, WorkerRecord("a", 0, 0, 0.0, 0, 0, 0.0))])
    assert read_agent(tmp_path / "agent0.jsonl")[0][0].result == {"at": "x/y"}


def test_nothing_else_is_left_behind(tmp_path: Path) -> None:
    ranks, workers, jobs = synthetic_run()
    write_rank(tmp_path / "rank0.jsonl", ranks[0])
    write_rank(tmp_path / "rank0.jsonl", ranks[1])
    write_agent(tmp_path / "agent0.jsonl", attempts_of(workers, jobs))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent0.jsonl", "rank0.jsonl"]
    assert read_rank(tmp_path / "rank0.jsonl") == ranks[1]


def test_lists_are_kept_by_column(tmp_path: Path) -> None:
    ranks, _, _ = synthetic_run()
    write_rank(tmp_path / "rank0.jsonl", ranks[0])
    [_, _, line, _] = (tmp_path / "rank0.jsonl").read_text().splitlines()
    bubbles = json.loads(line)["bubbles"]
    assert list(bubbles)[:3] == ["iteration", "index", "kind"]
    assert bubbles["kind"][:2] == ["fwd-bwd", "interior"]


def test_a_table_is_a_sequence_of_values() -> None:
    bubbles = synthetic_run()[0][0].bubbles
    columns = {name: [getattr(bubble, name) for bubble in bubbles] for name in Bubble.__slots__}
    table = Table(Bubble, columns)
    assert (len(table), table[0], table[-1], list(table[3:5])) == (20, bubbles[0], bubbles[-1], bubbles[3:5])
    assert table == bubbles
    assert bubbles == table
    assert table != bubbles[1:]
    assert column(table, "index") == column(bubbles, "index") == [0, 1] * 10
    with pytest.raises(IndexError):
        table[20]


# --- while it is written


def pieces(record: RankRecord, size: int) -> list[RankRecord]:
    """The record in parts of so many iterations."""
    parts = []
    for first in range(1, len(record.iterations) + 1, size):
        inside = range(first, first + size)
        parts.append(
            RankRecord(
                record.info,
                [one for one in record.iterations if one.iteration in inside],
                [one for one in record.bubbles if one.iteration in inside],
                [one for one in record.spans if one.iteration in inside],
            )
        )
    return parts


def wait_written(writer: RankWriter, path: Path, lines: int) -> None:
    for _ in range(int(WAIT_S / 0.01)):
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} does not have {lines} lines")


def add(writer: RankWriter, part: RankRecord) -> None:
    for _ in range(int(WAIT_S / 0.001)):
        if writer.ready:
            break
        time.sleep(0.001)
    writer.add(part)


def test_a_rank_adds_to_its_record(tmp_path: Path) -> None:
    record = synthetic_run()[0][0]
    path = tmp_path / "rank0.jsonl"
    writer = RankWriter(path, record.info)
    wait_written(writer, path, 1)
    assert read_rank(path) == replace(record, iterations=[], bubbles=[], spans=[])
    first, second, *rest = pieces(record, 4)
    writer.add(first)
    wait_written(writer, path, 4)
    assert read_rank(path) == first
    writer.add(second)
    assert writer.close(rest[0], WAIT_S)
    assert read_rank(path) == record


def test_a_last_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    record = synthetic_run()[0][0]
    path = tmp_path / "rank0.jsonl"
    write_rank(path, record)
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in (1, last // 2, last - 1):
        path.write_bytes(whole[:-cut])
        read = read_rank(path)
        assert read.bubbles == record.bubbles
        assert read.spans == (record.spans if cut == 1 else [])
    path.write_bytes(whole[:-last] + b"\0" * 4096)  # as a machine that lost its power leaves it
    assert read_rank(path) == replace(record, spans=[])


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b'{"version": 3, "ki'])
def test_what_was_killed_at_once_left_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank0.jsonl").write_bytes(content)
    with pytest.raises(NothingRecorded, match=r"rank0\.jsonl"):
        read_rank(tmp_path / "rank0.jsonl")


def test_a_long_record_keeps_its_recent_bubbles_and_the_sums_of_the_others(tmp_path: Path) -> None:
    record = synthetic_run()[0][1]
    path = tmp_path / "rank1.jsonl"
    write_rank(path, record)
    writer = RankWriter(tmp_path / "again.jsonl", record.info, spans=2, most_bytes=path.stat().st_size // 2)
    parts = pieces(record, 1)
    for part in parts[:-1]:
        add(writer, part)
    assert writer.close(parts[-1], WAIT_S)
    read = read_rank(tmp_path / "again.jsonl")
    assert read.iterations == record.iterations
    recent = [bubble for bubble in read.bubbles if bubble.index >= 0]
    assert 0 < len(recent) < len(record.bubbles)
    assert recent == record.bubbles[-len(recent) :]
    assert add_up(read.bubbles) == add_up(record.bubbles)
    assert record.spans[-8:] == read.spans[-8:]
    assert len(read.spans) < len(record.spans)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["again.jsonl", "rank1.jsonl"]


def test_a_disk_that_is_full_leaves_what_can_be_read(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "file"
    append(path, b"one\n")
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) > 2:
            return real(fd, bytes(data[:2]))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        append(path, b"three\n")
    monkeypatch.undo()
    append(path, b"four\n")
    assert path.read_bytes() == b"one\nfour\n"


def test_a_record_that_cannot_be_written_is_said_once_and_harms_nobody(tmp_path: Path, caplog) -> None:
    record = synthetic_run()[0][0]
    (tmp_path / "file").touch()
    writer = RankWriter(tmp_path / "file" / "rank0.jsonl", record.info)
    for part in pieces(record, 5):
        add(writer, part)
    assert not writer.close(record, WAIT_S)
    assert caplog.text.count("cannot be written") == 1


def test_what_a_full_disk_refused_is_written_once_there_is_room_or_the_folder_is_back(tmp_path: Path, caplog) -> None:
    record = synthetic_run()[0][0]
    folder = tmp_path / "run"
    folder.touch()  # in the folder's place: nothing can be written in it
    writer = RankWriter(folder / "rank0.jsonl", record.info)
    first, second, *others, last = pieces(record, 2)
    for part in (first, second):
        add(writer, part)
    until(lambda: "cannot be written" in caplog.text)
    folder.unlink()
    for part in others:
        add(writer, part)
    assert writer.close(last, WAIT_S)
    assert read_rank(folder / "rank0.jsonl") == record
    assert caplog.text.count("cannot be written") == 1


def test_a_record_whose_file_was_deleted_goes_on_in_a_new_one(tmp_path: Path) -> None:
    record = synthetic_run()[0][0]
    path = tmp_path / "rank0.jsonl"
    writer = RankWriter(path, record.info, most_bytes=1)
    first, *others, last = pieces(record, 2)
    add(writer, first)
    # Until it has been shortened as well, which makes the file anew.
    until(lambda: path.exists() and any(bubble.index < 0 for bubble in read_rank(path).bubbles))
    path.unlink()
    for part in others:
        add(writer, part)
    assert writer.close(last, WAIT_S)
    assert [one.iteration for one in read_rank(path).iterations] == [
        one.iteration for part in (*others, last) for one in part.iterations
    ]


def test_lines_that_wait_for_a_disk_take_no_more_memory_than_a_record_may(tmp_path: Path) -> None:
    record = synthetic_run()[0][0]
    folder = tmp_path / "run"
    folder.touch()
    writer = RankWriter(folder / "rank0.jsonl", record.info, most_bytes=2000)
    for part in pieces(record, 2):
        add(writer, part)
    until(lambda: writer.ready)
    folder.unlink()
    assert writer.close(RankRecord(record.info, [], [], []), WAIT_S)
    read = read_rank(folder / "rank0.jsonl")
    assert read.iterations == record.iterations
    assert add_up(read.bubbles) == add_up(record.bubbles)
    assert len(read.bubbles) < len(record.bubbles)


def test_the_recorder_writes_every_few_iterations_and_forgets(tmp_path: Path) -> None:
    record = synthetic_run()[0][0]
    path = tmp_path / "rank0.jsonl"
    recorder = Recorder(record.info, 3, path)
    recorder.schedule = CycleKey("1f1b", 2)
    for iteration in record.iterations:
        recorder.iteration_started()
        for bubble in record.bubbles:
            if bubble.iteration == iteration.iteration:
                recorder.bubble(bubble)
        for span in record.spans:
            if span.iteration == iteration.iteration:
                recorder.span(span.name, span.iteration, span.start_ns, span.end_ns)
        if iteration.iteration == WRITE_EVERY // 2:
            recorder.brakes.append(BrakeEvent(5, 0.1, 2, 9, 0))
            assert not path.exists() or not read_rank(path).iterations
        recorder.iteration_ended(iteration)
    assert len(record.iterations) == WRITE_EVERY
    assert recorder.bubbles == []
    assert recorder._writer is not None
    wait_written(recorder._writer, path, 5)
    assert read_rank(path) == replace(record, brakes=recorder.brakes, schedule=recorder.schedule)
    recorder.span("forward", WRITE_EVERY, 1, 2)  # an evaluation's
    recorder.brakes.append(BrakeEvent(10, 0.2, 2, 19, 0))
    assert recorder.close()
    read = read_rank(path)
    assert len(read.spans) == len(record.spans) + 1
    assert read.brakes == recorder.brakes


# --- segments


def test_segments_are_numbered_and_say_how_they_ended(tmp_path: Path) -> None:
    ranks, _, _ = synthetic_run()
    write_segment(tmp_path, ranks, ending=SegmentEnding.FAILED, jobs=["a", "b"], store="x.db", sandbox={"pid": "no"})
    going = write_segment(tmp_path, ranks[:1], ending=None, trace_iterations=7)
    (tmp_path / "records" / "3").mkdir()  # killed before it could say a word
    failed, running = read_segments(tmp_path)
    assert (failed.number, failed.ending, failed.command, failed.ranks) == (1, SegmentEnding.FAILED, "train", 2)
    assert (failed.jobs, failed.store, failed.sandbox) == (("a", "b"), "x.db", {"pid": "no"})
    assert failed.ended_s is not None
    assert (running.number, running.ending, running.ended_s, running.trace_iterations) == (
        2,
        SegmentEnding.RUNNING,
        None,
        7,
    )
    assert list(failed.files()) == [0, 1]
    assert list(failed.records()) == ranks
    going.end(SegmentEnding.WELL)
    assert last_segment(tmp_path).ending is SegmentEnding.WELL


def test_a_segment_whose_process_is_gone_was_cut_off(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from megatron.fill.records.segment import begin_segment, last_segment
opened = begin_segment(Path(sys.argv[1]), "train", 1)
print(last_segment(Path(sys.argv[1])).ending, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False)
    assert done.stdout == "running\n"
    assert last_segment(tmp_path).ending is SegmentEnding.CUT


def test_a_process_that_a_killed_training_has_forked_does_not_make_it_go_on(tmp_path: Path) -> None:
    def trains(out: int) -> None:
        opened = begin_segment(tmp_path, "train", 1)
        worker = os.fork()
        if worker:
            os.write(out, str(worker).encode())
        signal.pause()
        del opened

    rank = Child(trains)
    worker = int(os.read(rank.out, 16))
    try:
        assert last_segment(tmp_path).ending is SegmentEnding.RUNNING
        rank.kill()
        assert last_segment(tmp_path).ending is SegmentEnding.CUT
    finally:
        os.kill(worker, signal.SIGKILL)
        rank.end()


def test_a_segment_starts_with_its_process_and_not_after_the_imports(tmp_path: Path) -> None:
    """The accounts of its ranks begin there, too, so that no time is also between two starts."""
    assert begin_segment(tmp_path, "train", 1).segment.started_s < _IMPORTED_S


def test_two_trainings_at_once_do_not_share_a_segment(tmp_path: Path) -> None:
    one, other = begin_segment(tmp_path, "a", 1), begin_segment(tmp_path, "b", 1)
    assert one.segment.folder != other.segment.folder
    assert [segment.command for segment in read_segments(tmp_path)] == ["a", "b"]
    one.end(SegmentEnding.WELL)
    other.end(SegmentEnding.WELL)


def test_attempts_of_all_agents_of_a_rank_and_those_that_were_not_seen_to_end(tmp_path: Path) -> None:
    _, workers, jobs = synthetic_run()
    job, worker = attempts_of(workers, jobs)[0]

    def attempt(number: int, state: JobState = JobState.QUEUED) -> tuple[JobRecord, WorkerRecord]:
        return replace(job, attempt=number, ended_s=float(number), status=Status(state)), worker

    opened = begin_segment(tmp_path, "train", 2)
    first, second = (AgentFile(opened.segment.folder, 0, before) for before in (0, 1))
    first.add(*attempt(1))
    first.show([attempt(2, JobState.RUNNING)])  # then it was killed
    second.add(*attempt(3))
    second.show([attempt(3, JobState.RUNNING)])  # not told yet that this one has ended
    AgentFile(opened.segment.folder, 10).add(*attempt(1))
    [mine, other] = opened.segment.files().values()
    assert [(its.attempt, its.state) for its, _ in mine.attempts()] == [
        (1, JobState.QUEUED),
        (3, JobState.QUEUED),
        (2, JobState.RUNNING),
    ]
    assert len(other.attempts()) == 1
    assert other.record() is None
    second.show([])
    assert not (opened.segment.folder / "agent0-1.running.jsonl").exists()
    opened.end(SegmentEnding.WELL)


def test_a_folder_without_segments_is_named(tmp_path: Path) -> None:
    with pytest.raises(FillError, match=r"run: is no folder; expected a run folder"):
        read_segments(tmp_path / "run")


# --- what makes no sense


@pytest.mark.parametrize(
    ("line", "change", "message"),
    [
        (0, {"version": 99}, "has version 99; this PipeFill reads 5"),
        (0, {"kind": "agent"}, "is not the record of a PipeFill rank"),
        (0, {"info": {"rank": 0}}, "is damaged"),
        (2, {"bubbles": {"a": []}}, "is damaged: ValueError: the columns of Bubble are"),
        (2, {"spans": None}, "is damaged"),
        (2, {"odd": {}}, "is damaged"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, line: int, change: dict, message: str) -> None:
    path = tmp_path / "rank0.jsonl"
    write_rank(path, synthetic_run()[0][0])
    lines = path.read_text().splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **change})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(FillError, match=message) as caught:
        read_rank(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["{\n", "[]\n", "\udcff\n"])
def test_what_is_not_json_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "agent0.jsonl"
    write_agent(path, [])
    path.write_bytes(path.read_bytes() + text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FillError, match=r"agent0\.jsonl: line 2"):
        read_agent(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FillError, match=r"rank7\.jsonl: cannot be read"):
        read_rank(tmp_path / "rank7.jsonl")


def test_waiting_bubbles_of_a_disk_that_hangs_are_folded() -> None:
    record = synthetic_run()[0][0]
    recorder = Recorder(record.info, 3, kept_bubbles=8)
    for bubble in record.bubbles:
        recorder.bubble(bubble)
    assert len(recorder.bubbles) < 16
    assert add_up(recorder.bubbles) == add_up(record.bubbles)
    assert recorder.bubbles[-1] == record.bubbles[-1]
    assert sum(bubble.duration_ns for bubble in recorder.bubbles) == 300 * MS
