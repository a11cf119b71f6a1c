"""The verdict on a job of a chaos run: lost or not, and the faults that count as injected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.status import Status
from megatron.fill.store import open_store
from megatron.fill.store.values import Job, Progress
from megatron.fill.types import JobState
from megatron.fill.work import NewJob, Work
from tests.chaos.campaign import Findings
from tests.chaos.deed import Deed
from tests.chaos.kind import FaultKind
from tests.chaos.kinds import HONEST, KINDS
from tests.chaos.marks import Note, mark, prepare
from tests.chaos.results import compile_result
from tests.chaos.verdict import Lost, Submitted, judge


def ended(folder: Path, state: JobState, reason: str = "", work: float = 0.0) -> Job:
    store = open_store(folder / "jobs.db")
    job = store.submit([NewJob("job", Work())])[0]
    if state is not JobState.QUEUED:
        claim = store.claim("agent", [job.id], 10.0)
        assert claim is not None
        assert store.finish(claim, Status(state, detail=reason), Progress(work_done=work), {})
    found = store.get(job.id)
    store.close()
    return found


def submitted(folder: Path, kind: FaultKind, faults: int = 0) -> Submitted:
    folder.mkdir(exist_ok=True)
    notes = folder / f"{kind.name}.jsonl"
    prepare(notes)
    for _ in range(faults):
        mark(notes, Note.FAULT)
    return Submitted(1, "job", kind, 60, notes)


@pytest.mark.parametrize(
    ("kind", "state", "reason", "work", "why"),
    [
        (HONEST, JobState.SUCCEEDED, "", 60, None),
        (HONEST, JobState.SUCCEEDED, "", 61, "it did 61 of 60 steps"),
        (HONEST, JobState.FAILED, "no space", 60, "it is FAILED: no space; expected SUCCEEDED"),
        (HONEST, JobState.QUEUED, "", 0, "it is still QUEUED after 0 attempts: no reason"),
        (KINDS["sys-exit"], JobState.FAILED, "the task called sys.exit(3) in run_next_step()", 3, None),
        (KINDS["sys-exit"], JobState.SUCCEEDED, "", 3, "it is SUCCEEDED: no reason; expected FAILED with"),
        (KINDS["hang"], JobState.FAILED, "killed by SIGKILL", 3, "it is FAILED: killed by SIGKILL; expected FAILED"),
    ],
)
def test_a_job_is_lost_unless_it_ended_as_its_kind_demands(tmp_path, kind, state, reason, work, why):
    lost = judge(submitted(tmp_path, kind), ended(tmp_path, state, reason, work))
    if why is None:
        assert lost is None
    else:
        assert lost is not None
        assert why in lost.why


def test_a_job_is_one_fault_however_often_it_was_marked_and_none_when_it_is_lost(tmp_path):
    jobs = [submitted(tmp_path, KINDS["sigsegv"], 3), submitted(tmp_path, HONEST)]
    deeds = [Deed("agent-kill", 0, 1), Deed("agent-kill", 2, 3)]
    seen = Findings({}, jobs, deeds, [], [], [], [])
    assert seen.injected() == {"sigsegv": 1, "agent-kill": 2}
    assert seen.marks() == {"sigsegv": 3, "agent-kill": 2}
    seen = Findings({}, jobs, deeds, [Lost("job", "sigsegv", "")], [], [], [])
    assert seen.injected() == {"agent-kill": 2}


def test_an_attack_that_found_no_target_is_no_cause_and_its_kind_was_never_tried(tmp_path):
    missed, held = (submitted(tmp_path / name, KINDS["signal-agents"], 1) for name in ("a", "b"))
    mark(missed.notes, Note.MISSED, "nobody is there")
    seen = Findings({}, [missed], [], [], [], [], [])
    assert seen.injected() == {}
    assert seen.never_tried() == {"signal-agents": "nobody is there"}
    mark(held.notes, Note.HELD, "No such process")
    seen = Findings({}, [missed, held], [], [], [], [], [])
    assert seen.injected() == {"signal-agents": 1}
    assert seen.never_tried() == {}


def test_a_result_names_what_was_never_tried_also_when_the_marks_are_gone(tmp_path):
    missed = submitted(tmp_path, KINDS["signal-agents"], 1)
    mark(missed.notes, Note.MISSED, "nobody is there")
    result = compile_result(Findings({}, [missed], [], [], [], [], []), [missed.kind], 0, {})
    missed.notes.unlink()  # with the run's folder
    assert result.summary["never_tried"] == ["signal-agents"]
    assert result.as_dict("")["never_tried"] == [{"kind": "signal-agents", "why": "nobody is there"}]
    assert not result.passed


def test_what_must_be_refused_and_was_not_is_lost_however_its_job_ended(tmp_path):
    job = submitted(tmp_path, KINDS["mount"], 1)
    fine = ended(tmp_path, JobState.SUCCEEDED, "", 60)
    assert judge(job, fine) is None
    mark(job.notes, Note.HELD, "mount: Operation not permitted")
    assert judge(job, fine) is None
    mark(job.notes, Note.THROUGH, "pivot_root")
    lost = judge(job, fine)
    assert lost is not None
    assert lost.why == "got through: pivot_root"


def test_what_may_get_through_is_judged_by_the_end_of_its_job(tmp_path):
    job = submitted(tmp_path, KINDS["netlink"], 1)
    mark(job.notes, Note.THROUGH, "interfaces")
    assert judge(job, ended(tmp_path, JobState.SUCCEEDED, "", 60)) is None


@pytest.mark.parametrize(
    ("state", "work", "lost"),
    [
        (JobState.SUCCEEDED, 60, False),
        (JobState.FAILED, 5, False),
        (JobState.SUCCEEDED, 59, True),
        (JobState.QUEUED, 0, True),
    ],
)
def test_a_job_that_may_be_caught_either_fails_or_does_its_work_once(tmp_path, state, work, lost):
    assert (
        judge(submitted(tmp_path, KINDS["burn-thread"], 1), ended(tmp_path, state, "why", work)) is not None
    ) is lost


def test_work_that_is_no_number_is_never_well(tmp_path):
    job = submitted(tmp_path, KINDS["work-inf"], 1)
    fine = ended(tmp_path, JobState.SUCCEEDED, "", 7)
    assert judge(job, fine) is None
    lost = judge(job, replace(fine, progress=replace(fine.progress, work_done=float("inf"))))
    assert lost is not None
    assert lost.why == "it is said to have done inf steps"
