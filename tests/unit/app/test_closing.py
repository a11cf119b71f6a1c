"""The last words about a training that failed, or whose records cannot be kept."""

from __future__ import annotations

import errno
import os
import signal
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fill.app import closing
from megatron.fill.app.closing import go_on, kept, tell_of_jobs
from megatron.fill.app.launch import Launch, _run
from megatron.fill.config import FillSettings
from megatron.fill.errors import StoreError
from megatron.fill.records.segment import SegmentEnding, note_failure, read_segments
from megatron.fill.status import Status
from megatron.fill.types import JobRecord, JobState
from tests.support.segments import write_segment

STORE = "postgresql+psycopg://ada:secret@db/x"
WHERE = "the job store postgresql+psycopg://ada:***@db/x"


def session(run: Path, rank: int = 0, store: str = STORE, settings: FillSettings | None = None) -> Any:
    """A rank's session, as far as it is asked: its records are in the run folder itself."""
    settings = FillSettings(store=store) if settings is None else settings
    info = SimpleNamespace(rank=rank)
    return SimpleNamespace(segment=run, run_dir=run, info=info, store=store, settings=settings)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (
            [JobState.QUEUED, JobState.RUNNING],
            f"2 of its 2 jobs have not ended: they are queued in {WHERE} and go on when a training serves it again",
        ),
        (
            [JobState.SUCCEEDED, JobState.QUEUED, JobState.FAILED],
            f"of its 3 jobs 1 SUCCEEDED, 1 FAILED, 1 not: they are queued in {WHERE} and go on when a training serves "
            "it again",
        ),
        ([JobState.SUCCEEDED], "of its 1 jobs 1 SUCCEEDED"),
        ([None, None], "2 of its 2 jobs were not submitted yet; the next start in {run} submits them"),
        ([], f"jobs that have not ended are queued in {WHERE}"),
    ],
)
def test_the_first_rank_that_fails_says_once_where_the_jobs_are(tmp_path, capfd, monkeypatch, states, said):
    names = [f"job-{number}" for number in range(len(states))]

    def current_states(*asked: object) -> dict[str, JobRecord]:
        return {
            name: JobRecord(name, "sleep 1" if state else "", Status(state or JobState.QUEUED), 0, "")
            for name, state in zip(names, states, strict=True)
        }

    monkeypatch.setattr(closing, "current_states", current_states)
    for rank in (1, 0):
        tell_of_jobs(session(tmp_path, rank=rank), names)
    assert capfd.readouterr().out == f"PipeFill: the training has failed; {said.format(run=tmp_path)}\n"


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.SUCCEEDED])
def test_it_is_said_that_jobs_go_on_without_the_training_and_how_to_end_them(tmp_path, capfd, monkeypatch, state):
    job = JobRecord("pi", "sleep 1", Status(state), 0, "")
    monkeypatch.setattr(closing, "current_states", lambda *asked: {"pi": job})
    settings = FillSettings(between=300, store="s.db", report="a run")
    alone = "go on alone for at most 300 s; pipefill kill 'a run' ends them"
    assert go_on(settings, Path("a run")) == alone
    run = tmp_path / "a run"
    run.mkdir()
    tell_of_jobs(session(run, settings=settings), ["pi"])
    alone = alone.replace("'a run'", f"'{run}'")
    assert capfd.readouterr().out.endswith(f"; meanwhile they {alone}\n") is (state is JobState.QUEUED)
    assert go_on(FillSettings(store="s.db"), Path("a run")) == ""


def test_a_store_that_cannot_be_asked_is_named_all_the_same(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(closing, "current_states", lambda *asked: {})
    tell_of_jobs(session(tmp_path / "gone"), ["pi"])
    assert capfd.readouterr().out == (
        f"PipeFill: the training has failed; jobs that have not ended are queued in {WHERE}\n"
    )


def test_jobs_of_a_store_that_no_agent_has_made_yet_are_in_no_queue(tmp_path, capfd):
    tell_of_jobs(session(tmp_path, store=str(tmp_path / "jobs.db")), ["pi", "e"])
    assert capfd.readouterr().out == (
        "PipeFill: the training has failed; 2 of its 2 jobs were not submitted yet; the next start in "
        f"{tmp_path} submits them\n"
    )


def test_a_training_whose_rank_1_failed_has_failed_though_rank_0_could_not_say_so(tmp_path):
    opened = write_segment(tmp_path, [], ending=None)
    folder = opened.segment.folder
    assert [segment.ending for segment in read_segments(tmp_path)] == [SegmentEnding.RUNNING]
    assert note_failure(folder, 1)
    assert not note_failure(folder, 0)
    assert [segment.ending for segment in read_segments(tmp_path)] == [SegmentEnding.RUNNING]  # it is ending
    opened._close()  # a bare os.close would leave the number to be closed again in each fork from here on
    assert [segment.ending for segment in read_segments(tmp_path)] == [SegmentEnding.FAILED]
    assert (folder / "failed").read_text() == "rank 1\n"


@pytest.mark.parametrize("error", [OSError(errno.EDQUOT, "Disk quota exceeded"), StoreError("it is away")])
def test_what_is_lost_is_said_in_one_line_and_nothing_is_raised(caplog, error):
    with kept("the report could not be made"):
        raise error
    [record] = caplog.records
    assert record.exc_info is None
    assert record.getMessage() == f"the report could not be made, the training itself is done: {error}"


def test_a_fault_of_our_own_is_told_with_where_it_is(caplog):
    with kept("the report could not be made"):
        raise KeyError("of ours")
    assert "Traceback" in caplog.text


def test_a_failed_training_ends_its_part_whatever_handler_the_script_has_chained(tmp_path):
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))  # as core 0.20's pretrain has one
    try:
        run = Launch()
        run._run_dir = tmp_path
        run.abort()
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher's, after another rank has failed
        assert not received
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_a_script_that_exits_held_is_freed_before_the_report_even_if_the_report_keeps_an_error():
    class Loader:
        pass

    held: list[weakref.ref[Loader]] = []
    kept_errors: list[ValueError] = []

    class Run(Launch):
        def finish(self) -> None:
            try:
                raise ValueError
            except ValueError as error:
                kept_errors.append(error)
            assert held[0]() is None

    def script():
        loader = Loader()
        held.append(weakref.ref(loader))
        sys.exit()

    with pytest.raises(SystemExit):
        _run(script, Run())
    assert len(kept_errors) == 1
    assert held[0]() is None
