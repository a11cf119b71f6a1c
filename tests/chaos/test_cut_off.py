"""A chaos run that Ctrl-C or SIGTERM ends: it keeps its findings, and counts no job whose end it did not see."""

from __future__ import annotations

import os
import signal
from collections import deque
from pathlib import Path

import pytest

from tests.chaos import campaign, mainjob, plan
from tests.chaos import run as runner
from tests.chaos.campaign import Campaign, Findings
from tests.chaos.clock import JumpingClock
from tests.chaos.disk import SmallDisk
from tests.chaos.kinds import KINDS, chosen
from tests.chaos.marks import Note, mark, prepare
from tests.chaos.results import compile_result
from tests.chaos.verdict import Submitted


class Training:
    """Stands in for a training with these ``losses`` so far, and runs until it is ended."""

    def __init__(self, losses: dict[int, float], failed: str = "") -> None:
        self.seen, self.failed, self.ended = losses, failed, False

    def running(self) -> bool:
        return not self.failed and not self.ended

    def failure(self) -> str:
        return self.failed or "its ranks ended with -9 and -9"

    def losses(self) -> dict[int, float]:
        return self.seen

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def main(tmp_path):
    said: list[str] = []
    found = mainjob.RepeatedTraining(Path("none"), tmp_path, tmp_path, JumpingClock(tmp_path / "c"), 200, said.append)
    found.reference = {1: 3.0, 2: 2.0, 3: 1.0}
    return found


def test_what_a_cut_off_training_has_done_is_compared_and_its_end_is_no_failure(main):
    main.training = training = Training({1: 3.0, 2: 2.5})
    main.cut_off()
    assert training.ended
    assert main.training is None
    assert [(one.failure, one.differing) for one in main.segments] == [("", (2,))]
    main.cut_off()
    assert len(main.segments) == 1


def test_a_training_that_had_failed_before_the_run_was_cut_off_counts_as_failed(main):
    main.training = Training({1: 3.0}, failed="a rank ended with 1")
    main.cut_off()
    assert [one.failure for one in main.segments] == ["a rank ended with 1"]


def test_a_run_keeps_what_it_saw_before_it_was_cut_off(tmp_path, monkeypatch):
    """End a campaign in its second batch, whose jobs have made marks and have not been seen to end."""
    monkeypatch.setattr(plan, "batches", lambda elements, seed: [elements[:1], elements[1:]])
    monkeypatch.setattr(plan, "HONEST_PER_BATCH", 0)
    monkeypatch.setattr("tests.chaos.disk._mount", lambda folder: "not in a test")
    monkeypatch.setattr(mainjob.RepeatedTraining, "refer", lambda self: None)
    monkeypatch.setattr(mainjob.RepeatedTraining, "tick", lambda self: None)
    monkeypatch.setattr(mainjob.RepeatedTraining, "settled", lambda self: True)
    monkeypatch.setattr(campaign, "_LEAST_QUIET_S", 0.0)
    kinds = chosen(["sigsegv"])
    found = Campaign(Path("none"), kinds, tmp_path, SmallDisk(tmp_path / "disk"), 200, lambda line: None)
    turns = deque([False, True])

    def await_end(self: Campaign, jobs: list[Submitted]) -> None:
        for job in jobs:
            mark(job.notes, Note.FAULT)
        if turns.popleft():
            os.kill(os.getpid(), signal.SIGTERM)
        self._judged = len(self.submitter.jobs)

    monkeypatch.setattr(Campaign, "_await", await_end)
    with runner._terminated_as_interrupted():
        seen = found.run(3, 0)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [job.name for job in seen.jobs] == ["sigsegv-0", "sigsegv-1", "sigsegv-2"]
    result = compile_result(seen, kinds, 1, {})
    assert result.summary["injected"] == 1
    assert result.summary["cut_off"]
    assert not result.passed


def test_a_run_that_is_cut_off_in_its_reference_training_has_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.chaos.disk._mount", lambda folder: "not in a test")
    monkeypatch.setattr(mainjob.RepeatedTraining, "refer", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    found = Campaign(Path("none"), chosen(["sigsegv"]), tmp_path, SmallDisk(tmp_path / "d"), 200, lambda line: None)
    with pytest.raises(KeyboardInterrupt), runner._terminated_as_interrupted():
        found.run(1, 0)


def test_what_an_unjudged_job_got_through_with_is_in_no_figure(tmp_path):
    job = Submitted(1, "vm-write-rank-0", KINDS["vm-write-rank"], 10, tmp_path / "notes")
    prepare(job.notes)
    mark(job.notes, Note.FAULT)
    mark(job.notes, Note.HELD, "no")
    seen = Findings({}, [job], [], [], [], [], [], unjudged={job.name})
    (row,) = compile_result(seen, [job.kind], 1, {}).kinds
    assert (row.injected, row.observed, row.outcomes["refused"]) == (0, "was not seen", 0)
