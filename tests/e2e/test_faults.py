"""Whatever a side task does, the training goes on unchanged, and the job says what happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.training import Trained, finished, processes, settings, train_until, write_jobs
from tests.support.waiting import until


def fault(name: str, where: str, what: str) -> dict:
    return {"name": name, "task": "tasks:Faulty", "args": {"where": where, "what": what}}


# name -> (the job, what its reason must say)
FAULTS = {
    "create": (fault("create", "create", "raise_error"), "ValueError: made to fail in create()"),
    "init": (fault("init", "init", "raise_error"), "ValueError: made to fail in init()"),
    "start": (fault("start", "start", "raise_error"), "ValueError: made to fail in start()"),
    "step": (fault("step", "run_next_step", "raise_error"), "ValueError: made to fail in run_next_step()"),
    "pause": (fault("pause", "pause", "raise_error"), "ValueError: made to fail in pause()"),
    "stop": (fault("stop", "stop", "raise_error"), "ValueError: made to fail in stop()"),
    "exit": (fault("exit", "run_next_step", "exit"), "sys.exit(3) in run_next_step()"),
    "hard-exit": (fault("hard-exit", "run_next_step", "hard_exit"), "exited with status 4 in run_next_step()"),
    "killed": (fault("killed", "run_next_step", "kill"), "killed by SIGKILL in run_next_step()"),
    "segfault": (fault("segfault", "init", "segfault"), "killed by SIGSEGV in init()"),
    "nonsense": (fault("nonsense", "run_next_step", "nonsense"), "returned 'a lot'; expected the work done"),
    "hang": (
        fault("hang", "run_next_step", "hang"),
        "run_next_step() hung: it went on for",
    ),
    "flood": (fault("flood", "run_next_step", "flood"), "printed more than 4 MiB"),
    "flood-at-once": (fault("flood-at-once", "run_next_step", "flood_at_once"), ""),  # whichever limit is first
    "hog": (
        fault("hog", "init", "hog") | {"memory": "256MiB"},
        "an allocation was refused within its cap of 256 MiB in init()",
    ),
    "orphan": (fault("orphan", "run_next_step", "fork_and_leave"), "left a child behind"),
    "no-module": ({"name": "no-module", "task": "nowhere_at_all:Task"}, "importing nowhere_at_all failed"),
    "no-class": ({"name": "no-class", "task": "tasks:Missing"}, "tasks has no Missing"),
    "no-task": ({"name": "no-task", "task": "tasks:NoTask"}, "tasks:NoTask is not a SideTask"),
    "wrong-args": ({"name": "wrong-args", "task": "tasks:Spin", "args": {"speed": 1}}, "unexpected keyword argument"),
    "no-command": ({"name": "no-command", "command": "no-such-program --flag"}, "command not found: no-such-program"),
    "bad-command": ({"name": "bad-command", "command": "sh -c 'exit 7'"}, "exited with status 7"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder: Path = tmp_path_factory.mktemp("faults")
    jobs = write_jobs(folder, *(job for job, _ in FAULTS.values()))
    limits = settings(warmup_iterations=2, grace_ms=100, max_overruns=2, max_output_mib=4)
    return train_until(folder, f"{jobs} {limits}", dict.fromkeys(FAULTS, finished))


@pytest.mark.parametrize("name", FAULTS)
def test_the_job_fails_and_says_why(run, name):
    job = run.jobs[name]
    assert job["state"] == "FAILED"
    assert job["reason"]
    assert FAULTS[name][1] in job["reason"]


def test_output_is_kept_and_bounded(run):
    assert "ValueError: made to fail" in run.printed("step").read_text()
    flood = run.printed("flood")
    assert 900_000 < flood.stat().st_size < 1_200_000
    assert b"bytes left out" in flood.read_bytes()


def test_nothing_is_left_running(run):
    until(lambda: not processes("sleep 86399"))
    assert not processes(str(run.folder))
