"""When a job of a chaos run counts as lost, and when its faults count as injected."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.fill.chaos.campaign import Findings
from megatron.fill.chaos.injector import Deed
from megatron.fill.chaos.kinds import HONEST, KINDS, Kind
from megatron.fill.chaos.marks import Event, mark
from megatron.fill.chaos.verdict import Lost, Submitted, judge
from megatron.fill.store import open_store
from megatron.fill.store.port import Job, NewJob, Progress
from megatron.fill.types import JobState


def ended(folder: Path, state: JobState, reason: str = "", work: float = 0.0) -> Job:
    store = open_store(folder / "jobs.db")
    job = store.submit([NewJob("job", {})])[0]
    if state is not JobState.QUEUED:
        claim = store.claim("agent", [job.id], 10.0)
        assert claim is not None
        assert store.finish(claim, state, reason, Progress(work_done=work), {})
    found = store.get(job.id)
    store.close()
    return found


def submitted(folder: Path, kind: Kind, faults: int = 0) -> Submitted:
    notes = folder / f"{kind.name}.jsonl"
    for _ in range(faults):
        mark(notes, Event.FAULT)
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


def test_faults_count_when_marked_or_done_but_not_those_of_a_lost_job(tmp_path):
    jobs = [submitted(tmp_path, KINDS["sigsegv"], 3), submitted(tmp_path, HONEST)]
    deeds = [Deed("agent-kill", 0, 1), Deed("agent-kill", 2, 3)]
    seen = Findings({}, jobs, deeds, [], [], [], [])
    assert seen.injected() == {"sigsegv": 3, "agent-kill": 2}
    seen = Findings({}, jobs, deeds, [Lost("job", "sigsegv", "")], [], [], [])
    assert seen.injected() == {"agent-kill": 2}
