"""What the store says of jobs whose end a run's records do not tell."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron.fill.status import Status
from megatron.fill.store import JobStore, Progress, open_store
from megatron.fill.store.states import current_states
from megatron.fill.types import JobState
from megatron.fill.work import NewJob, Work

WORK = Work("m:C")


@pytest.fixture
def store(tmp_path):
    opened = open_store(tmp_path / "jobs.db")
    yield opened
    opened.close()


def held(store: JobStore, name: str, run_dir: Path, lease_s: float = 3600) -> None:
    [job] = store.submit([NewJob(name, WORK)])
    claim = store.claim("agent", [job.id], 3600, f"rank 1 of {run_dir} on host")
    assert claim is not None
    store.place(claim, str(run_dir / "jobs" / name))
    store.heartbeat(claim, Progress(unit="images"), lease_s)


def test_of_each_job_its_state_and_why(store, tmp_path):
    mine, other = tmp_path / "mine on it", tmp_path / "other"
    held(store, "killed", mine)
    held(store, "elsewhere", other)
    store.submit([NewJob("waits", WORK), NewJob("long", Work(command=("sleep", "9")))])
    store.note(store.find("long").id, Status(JobState.QUEUED, detail="does not fit rank 0"))
    store.submit([NewJob("last", Work("m:C", after=("long", "waits")))])
    held(store, "lost", mine, 0.001)
    time.sleep(0.01)
    names = ["killed", "elsewhere", "waits", "long", "last", "lost", "never"]
    found = current_states(str(tmp_path / "jobs.db"), mine, False, names)
    assert {name: (its.state, its.reason) for name, its in found.items()} == {
        "killed": (JobState.RUNNING, "its agent was killed; it goes back to the queue when the lease ends"),
        "elsewhere": (JobState.RUNNING, f"another run has it: rank 1 of {other} on host"),
        "waits": (JobState.QUEUED, "no rank has been free for it"),
        "long": (JobState.QUEUED, "does not fit rank 0"),
        "last": (JobState.QUEUED, "it begins after long (QUEUED) and 1 more"),
        "lost": (JobState.RUNNING, "its agent is gone; it goes on when a training serves its store again"),
        "never": (JobState.QUEUED, "it was not submitted; the agents' logs say why"),
    }
    assert (found["killed"].what, found["long"].what, found["killed"].unit) == ("m:C", "sleep 9", "images")
    assert found["killed"].directory == str(mine / "jobs" / "killed")
    assert current_states(str(tmp_path / "jobs.db"), mine, True, ["killed"])["killed"].reason == ""


def test_a_store_that_is_not_there_says_nothing_and_is_not_made(tmp_path, caplog):
    assert current_states(str(tmp_path / "gone.db"), tmp_path, False, ["a"]) == {}
    assert "of some jobs the report knows only what their agents wrote: there is no job store" in caplog.text
    assert list(tmp_path.iterdir()) == []
