"""Fill jobs through the store while a training runs: planned, submitted later, cancelled, killed, and going on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.folders import output_file
from megatron.fill.sandbox.landlock import landlock_abi
from megatron.fill.types import JobState
from tests.e2e.training import WORKER, Running, processes, settings, warm_python, write_jobs

CLI = ["-c", "from megatron.fill.cli import main; main()"]
LAYERS = {"name": "layers", "task": "tasks:Layers", "args": {"milliseconds": [1, 2, 0.5, 1]}, "count": 2}
BIG = {"name": "big", "task": "tasks:Layers", "args": {"milliseconds": [200], "batches": [1]}, "priority": 5}
TAIL = {"name": "tail", "task": "tasks:Spin", "args": {"milliseconds": 0.3}, "memory": "1GiB", "priority": -1}
LATER = {"name": "later", "task": "tasks:Spin", "args": {"milliseconds": 0.3, "steps": 5}, "memory": "1GiB"}
LOST = 100  # samples: what the bubbles of a few seconds hold


class Story(Running):
    """A training, its store, and what a user does meanwhile."""

    def __init__(self, folder: Path) -> None:
        jobs = write_jobs(folder, BIG)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_TOKEN", "secret")
            super().__init__(
                folder, f"{jobs} --fill-checkpoint-seconds 0.5 {settings(warmup_iterations=3, lease_seconds=2)}"
            )
        self.job("big")

    def wait_for_heartbeat(self, name: str) -> None:
        """Wait until the job's agent has been heard of once more."""
        lease_s = self.job(name).lease_until_s
        self.wait(lambda: self.job(name).lease_until_s != lease_s)

    def submit(self, *jobs: dict[str, Any]) -> None:
        path = self.folder / "more.yaml"
        path.write_text(json.dumps({"jobs": jobs}))
        self.pipefill("submit", str(path))

    def pipefill(self, *arguments: str, tries: int = 1) -> str:
        environment = os.environ | {"PIPEFILL_STORE": str(self.folder / "run")}
        command = [sys.executable, *warm_python(), *CLI, *arguments]
        for left in reversed(range(tries)):
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            if not done.returncode:
                break
            assert left, done.stderr or done.stdout
        return done.stdout

    def control(self, *arguments: str) -> str:
        """Change the run's state, again where a busy machine has not let all agents acknowledge it in time."""
        return self.pipefill(*arguments, tries=20)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    running = Story(tmp_path_factory.mktemp("fill-jobs"))
    yield running
    running.process.kill()
    running.process.wait()


# These tests are steps of one story, in order: a training is too dear to have one each.


def test_a_job_that_fits_no_bubble_says_by_how_much(running):
    # No other job waits yet: where the first cycle has no bubble for anything, a free seat looks again at the next one.
    running.wait(lambda: "too long for bubble" in running.job("big").reason)
    assert re.match("does not fit rank .*: node 'forward 0' of b1", running.job("big").reason)
    assert running.job("big").state is JobState.QUEUED


def test_jobs_are_measured_planned_and_get_on(running):
    running.submit(LAYERS, TAIL)
    for name in ("layers-0", "layers-1"):
        running.wait(lambda: running.job(name).progress.work_done > 0)  # noqa: B023
        folder = Path(running.job(name).directory)
        assert json.loads((folder / "plan.json").read_text())["work"] > 0
    shown = json.loads(running.pipefill("show", "layers-0", "--json"))
    assert shown["state"] == "RUNNING"
    assert shown["unit"] == "samples"


def test_the_tail_job_uses_what_they_leave(running):
    running.wait(lambda: running.job("tail").progress.work_done > 0)
    running.wait(lambda: sum(job.state is JobState.RUNNING for job in running.store.list()) == 3)


def test_a_running_job_is_cancelled(running):
    running.pipefill("cancel", "tail")
    running.wait(lambda: running.job("tail").state is JobState.CANCELLED)
    assert running.job("tail").reason == "cancelled while it ran"


def test_a_job_submitted_later_is_run(running):
    running.submit(LATER)
    running.wait(lambda: running.job("later").state is JobState.SUCCEEDED)
    assert running.job("later").progress.work_done == 5


def test_failures_limits_and_order(running):
    twice = ["sh", "-c", "echo $PIPEFILL_ATTEMPT >> tries; test $(wc -l < tries) -ge 2"]
    jobs: list[dict[str, Any]] = [
        {"name": "last", "command": "true", "after": ["flaky"]},
        {"name": "flaky", "command": twice, "retries": 3},
        {"name": "endless", "command": "sleep 100000", "timeout": "1s"},
    ]
    jobs = [job | {"memory": "1GiB"} for job in jobs]  # so they may run beside others
    running.submit(*jobs)
    running.wait(lambda: all(running.job(job["name"]).state.finished for job in jobs))
    last, flaky, endless = (running.job(job["name"]) for job in jobs)
    assert (flaky.state, flaky.progress.failures) == (JobState.SUCCEEDED, 1)
    assert last.state is JobState.SUCCEEDED
    assert last.started_s >= flaky.finished_s
    assert (endless.state, endless.reason) == (JobState.FAILED, "it ran for longer than its timeout of 1 s")
    assert running.pipefill("show", "last").count("1 of 1 SUCCEEDED") == 1


def test_a_killed_worker_costs_no_more_than_the_interval(running):
    running.wait(lambda: running.job("layers-0").progress.checkpoint_s)
    before = running.job("layers-0")
    workers = processes(WORKER, before.directory)
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    running.wait(lambda: running.job("layers-0").attempt > before.attempt)
    log = output_file(Path(before.directory))
    running.wait(lambda: log.exists() and "goes on from its checkpoint" in log.read_text())
    assert "measuring" not in log.read_text()  # the profile was kept
    assert log.with_name(f"{log.stem}.{before.attempt}.log").exists()
    checkpoint_s = running.job("layers-0").progress.checkpoint_s
    running.wait(lambda: running.job("layers-0").progress.checkpoint_s > checkpoint_s)
    assert running.job("layers-0").progress.work_done >= before.progress.work_done - LOST


def test_a_killed_agents_job_comes_back(running):
    before = running.job("layers-1")
    agent = int(before.owner.rpartition("pid ")[2])
    os.kill(agent, signal.SIGKILL)
    running.wait(lambda: running.job("layers-1").owner != before.owner)
    assert not processes(WORKER, before.directory, str(agent))


def test_a_job_sees_and_reaches_nothing_of_the_training(running):
    probe = {"name": "probe", "task": "tasks:Probe", "memory": "1GiB", "priority": 9, "env": {"MODE": "fast"}}
    running.submit(probe)
    running.wait(lambda: running.job("probe").state.finished)
    seen = running.job("probe").result
    assert "MODE" in seen["environment"]
    foreign = ("MASTER_ADDR", "RANK", "WORLD_SIZE", "PIPEFILL_CPU_BACKEND", "HF_TOKEN")
    assert not set(seen["environment"]) & set(foreign)
    shared = {f"/memfd:pipefill-{name}" for name in ("baton", "control", "cycle", "gate", "steps")}
    # A task measures its own peak; the file of /proc for that it could not open any more.
    assert {name for name in seen["files"] if not name.endswith("/clear_refs")} <= shared
    assert seen["no_new_privileges"]
    assert seen["directory"] == running.job("probe").directory
    assert seen["writable"] == [seen["directory"]]
    if landlock_abi() >= 6:
        assert seen["reached"] == []


def test_pause_holds_and_resume_goes_on(running):
    run = str(running.folder / "run")
    running.wait(lambda: running.job("layers-0").state is JobState.RUNNING)
    shown = json.loads(running.control("pause", run, "--json"))
    assert [(rank["state"], rank["acknowledged"]) for rank in shown["ranks"]] == [("PAUSED", True)] * 2
    for _ in range(2):  # the first one may have begun before
        running.wait_for_heartbeat("layers-0")
    before = running.job("layers-0").progress
    running.wait_for_heartbeat("layers-0")
    assert running.job("layers-0").progress.steps == before.steps
    running.control("resume", run)
    running.wait(lambda: running.job("layers-0").progress.steps > before.steps)


def test_kill_puts_jobs_back_and_resume_takes_them_again(running):
    run = str(running.folder / "run")
    running.wait(lambda: running.job("layers-0").state is JobState.RUNNING)
    running.control("kill", run)
    assert not processes(WORKER, run)
    running.wait(lambda: running.job("layers-0").state is JobState.QUEUED)
    assert running.job("layers-0").reason.startswith("ended by pipefill kill; it ")
    result = Path(running.job("layers-0").directory) / "result.json"
    result.unlink(missing_ok=True)  # that of the attempt that was killed
    running.control("resume", run)
    running.wait(lambda: running.job("layers-0").state is JobState.RUNNING and result.exists())


def test_the_end_of_the_training_puts_jobs_back(running):
    trained = running.end()
    states = {job.name: job.state for job in running.store.list()}
    assert states == {
        **dict.fromkeys(["layers-0", "layers-1", "big"], JobState.QUEUED),
        "tail": JobState.CANCELLED,
        "later": JobState.SUCCEEDED,
        **dict.fromkeys(["probe", "flaky", "last"], JobState.SUCCEEDED),
        "endless": JobState.FAILED,
    }
    jobs = trained.jobs
    assert jobs["layers-0"]["reason"] == "the main job ended first; goes on from its checkpoint"
    done = running.job("layers-0").progress.work_done
    result = json.loads((Path(jobs["layers-0"]["directory"]) / "result.json").read_text())
    assert done >= result["samples"] > 0
    assert not processes(str(running.folder))
