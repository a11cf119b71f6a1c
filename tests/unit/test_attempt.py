"""How an attempt at a job is judged: what was cut off goes back, what only ever dies does not."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fill.control import RunState
from megatron.fill.records import AgentFile, read_agent
from megatron.fill.runtime.agent import Agent
from megatron.fill.runtime.attempt import Attempt
from megatron.fill.runtime.spec import Outcome
from megatron.fill.runtime.steplog import Saving, StepLog, create_log
from megatron.fill.runtime.verdict import End, Judge, Verdict
from megatron.fill.store.port import Progress, Standing
from megatron.fill.types import BubbleUse, JobRecord, JobState, WorkerRecord

DIED = Outcome(JobState.FAILED, "the worker was killed by SIGSEGV in run_next_step()")
GAVE_BACK = Outcome(JobState.QUEUED, "goes on from its checkpoint")


class Bench:
    """An attempt without a worker."""

    def __init__(self) -> None:
        self.agent = SimpleNamespace(over=False, judge=Judge(), control=SimpleNamespace(state=RunState.RUNNING))
        self.attempt = Attempt.__new__(Attempt)
        self.attempt.agent = self.agent  # type: ignore[assignment]
        self.attempt.job = SimpleNamespace(id=7, progress=Progress(), spec={})  # type: ignore[assignment]
        self.attempt.held = SimpleNamespace(standing=Standing.HELD)  # type: ignore[assignment]
        self.attempt.log = StepLog(create_log())
        self.attempt.started_s, self.attempt.started_ns = time.time(), time.monotonic_ns()
        self.attempt.timeout_s = math.inf

    def judge(
        self,
        outcome: Outcome,
        crashed: bool = False,
        stopped: str = "",
        cut: str = "",
        request: str = "",
        late: bool = False,
    ) -> tuple[JobState, str]:
        run: Any = SimpleNamespace(stopped=stopped, cut=cut, late=late)
        room: Any = SimpleNamespace(request=request)
        verdict = self.attempt._verdict(run, room, outcome, crashed)
        return verdict.state, verdict.reason


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_a_worker_says_of_itself_is_taken(bench):
    assert bench.judge(Outcome(JobState.SUCCEEDED, "")) == (JobState.SUCCEEDED, "")
    assert bench.judge(Outcome(JobState.FAILED, "ValueError")) == (JobState.FAILED, "ValueError")
    assert bench.judge(Outcome(JobState.QUEUED, "too long", unfit=True)) == (JobState.QUEUED, "too long")


def test_a_job_that_dies_is_tried_again_twice(bench):
    again = f"{DIED.reason}; it is tried again"
    assert [bench.judge(DIED, crashed=True) for _ in range(2)] == [(JobState.QUEUED, again)] * 2
    state, reason = bench.judge(DIED, crashed=True)
    assert state is JobState.FAILED
    assert reason == f"{DIED.reason}, 3 times in a row without having saved anything"


def test_one_that_saves_between_its_deaths_goes_on(bench):
    for _ in range(5):
        bench.attempt.log.checkpoint_s = time.time() + 1
        assert bench.judge(DIED, crashed=True)[0] is JobState.QUEUED


def test_what_it_claims_to_have_saved_does_not_keep_it_going_for_ever(bench):
    bench.attempt.log.checkpoint_s = time.time() + 3600
    states = [bench.judge(DIED, crashed=True)[0] for _ in range(12)]
    assert states == [JobState.QUEUED] * 11 + [JobState.FAILED]


def test_a_worker_that_gives_up_unasked_has_died(bench):
    for _ in range(2):
        assert bench.judge(GAVE_BACK)[1] == "the worker gave up without being asked to; it is tried again"
    assert bench.judge(GAVE_BACK)[0] is JobState.FAILED
    # What it scribbles into the log about memory is not a request.
    assert Bench().judge(Outcome(JobState.QUEUED, "x", crowded=True))[1].startswith("the worker gave up")


def test_one_that_was_asked_to_stop_says_why(bench):
    assert bench.judge(GAVE_BACK, stopped="the main job needs the memory")[1] == (
        "the main job needs the memory; goes on from its checkpoint"
    )
    crowded = Outcome(JobState.QUEUED, "it begins again from its start", crowded=True)
    assert bench.judge(crowded, request="the main job grew") == (
        JobState.QUEUED,
        "the main job grew; it begins again from its start",
    )
    bench.agent.over = True
    for _ in range(5):
        assert bench.judge(GAVE_BACK) == (JobState.QUEUED, "the main job ended first; goes on from its checkpoint")


def test_one_that_was_cut_off_is_not_to_blame(bench):
    bench.attempt.log.checkpoint_s = time.time() + 1
    assert bench.judge(DIED, crashed=True, cut="ended by pipefill kill") == (
        JobState.QUEUED,
        "ended by pipefill kill; it goes on from its last checkpoint",
    )
    assert Bench().judge(DIED, crashed=True, stopped="the main job ended first") == (
        JobState.QUEUED,
        "the main job ended first; it begins again",
    )


def test_a_cancelled_job_is_cancelled_unless_it_was_done(bench):
    bench.attempt.held.standing = Standing.CANCELLED
    assert bench.judge(GAVE_BACK, stopped="it was cancelled") == (JobState.CANCELLED, "cancelled while it ran")
    assert bench.judge(Outcome(JobState.SUCCEEDED, ""))[0] is JobState.SUCCEEDED


def test_one_that_failed_is_tried_again_as_often_as_it_asks_for(bench):
    bench.attempt.job.spec = {"retries": 2}
    wrong = Outcome(JobState.FAILED, "ValueError")
    verdict = bench.agent.judge.verdict(bench.attempt.job, End(wrong))
    assert verdict == Verdict(JobState.QUEUED, "ValueError; retry 1 of 2", failed=True)
    bench.attempt.job.progress = Progress(failures=1)
    assert bench.judge(wrong) == (JobState.QUEUED, "ValueError; retry 2 of 2")
    bench.attempt.job.progress = Progress(failures=2)
    assert bench.judge(wrong) == (JobState.FAILED, "ValueError")
    assert bench.judge(Outcome(JobState.SUCCEEDED, "")) == (JobState.SUCCEEDED, "")


def test_each_try_may_die_as_often_as_the_first(bench):
    bench.attempt.job.spec = {"retries": 1}
    reasons = [bench.judge(DIED, crashed=True)[1].rpartition("; ")[2] for _ in range(6)]
    again = "it is tried again"
    assert reasons == [again, again, "retry 1 of 1", again, again, "retry 1 of 1"]  # the store counts them


def test_a_failure_is_counted_in_what_the_store_hears(bench):
    bench.attempt.job.progress = Progress(work_done=3.0, failures=1)
    bench.attempt.failed = False
    assert bench.attempt._progress().failures == 1
    bench.attempt.failed = True
    assert (bench.attempt._progress().failures, bench.attempt._progress().work_done) == (2, 3.0)


def test_a_job_that_runs_for_too_long_has_failed(bench):
    attempt = bench.attempt
    attempt.timeout_s = attempt.job.spec["timeout_s"] = 60
    assert attempt._why_stop() == ""
    attempt.started_ns -= 61 * 10**9
    stopped = attempt._why_stop()
    assert bench.judge(GAVE_BACK, stopped=stopped) == (JobState.FAILED, "it ran for longer than its timeout of 60 s")
    assert bench.judge(DIED, crashed=True, stopped=stopped, late=True)[0] is JobState.FAILED
    assert bench.judge(Outcome(JobState.SUCCEEDED, ""), stopped=stopped)[0] is JobState.SUCCEEDED
    attempt.job.spec["retries"] = 1
    assert bench.judge(GAVE_BACK, stopped=stopped)[0] is JobState.QUEUED


_ASKED = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # it may come before the sleep
print("up", flush=True)
signal.sigwait([signal.SIGUSR1])
print("asked", flush=True)
"""


def test_a_task_is_asked_to_shrink_and_nobody_else(bench):
    task = subprocess.Popen([sys.executable, "-c", _ASKED], stdout=subprocess.PIPE, text=True)
    assert task.stdout is not None
    assert task.stdout.readline() == "up\n"
    bench.attempt.confined = SimpleNamespace(pid=task.pid)
    bench.attempt.job.spec = {"command": None}
    bench.attempt._ask_to_shrink(0)  # all of it: that is a wish, too
    assert bench.attempt.log.wanted_bytes == 0
    assert task.stdout.readline() == "asked\n"
    assert task.wait() == 0
    bench.attempt._ask_to_shrink(1 << 32)  # it has ended just now
    assert bench.attempt.log.wanted_bytes == 1 << 32


def test_a_command_cannot_shrink_and_is_not_signalled(bench, monkeypatch):
    sent: list[signal.Signals] = []
    monkeypatch.setattr(bench.attempt, "_signal", sent.append, raising=False)
    bench.attempt.job.spec = {"command": ["sleep", "1"]}
    bench.attempt._ask_to_shrink(1)
    assert (sent, bench.attempt.log.wanted_bytes) == ([], None)


def test_a_job_that_moves_goes_on_from_its_checkpoint(bench):
    bench.attempt.held.standing = Standing.MOVE
    bench.attempt.log.saving = Saving.SAVED
    stopped = bench.attempt._why_stop()
    assert stopped == "it moves to a rank that is idle"
    assert bench.judge(GAVE_BACK, stopped=stopped) == (JobState.QUEUED, f"{stopped}; goes on from its checkpoint")
    assert bench.judge(Outcome(JobState.SUCCEEDED, ""), stopped=stopped)[0] is JobState.SUCCEEDED
    assert [bench.judge(DIED, crashed=True)[0] for _ in range(2)] == [JobState.QUEUED] * 2  # no move counted


def test_one_that_is_too_slow_to_stop_moves_all_the_same(bench):
    """It was saved before, and it is not to blame for a machine that is busy."""
    slow = Outcome(JobState.FAILED, "stop() did not return within 10 s of the stop: ...")
    bench.attempt.log.checkpoint_s = time.time()
    moves = "it moves to a rank that is idle"
    queued = (JobState.QUEUED, f"{moves}; it goes on from its last checkpoint")
    assert bench.judge(slow, stopped=moves, late=True) == queued
    assert bench.judge(slow, stopped=moves)[0] is JobState.FAILED  # ended for another reason
    assert bench.judge(slow, stopped="the main job ended first", late=True)[0] is JobState.QUEUED
    assert bench.judge(slow, stopped="the main job needs the memory", late=True)[0] is JobState.FAILED


def test_a_job_moves_only_after_it_was_saved_anew(bench):
    attempt, log = bench.attempt, bench.attempt.log
    log.saving = Saving.SAVED  # for an earlier request, say
    assert (attempt._why_stop(), log.saving) == ("", Saving.NONE)
    attempt.held.standing = Standing.MOVE
    assert (attempt._why_stop(), log.saving) == ("", Saving.WANTED)
    assert attempt._why_stop() == ""
    log.saving = Saving.FAILED
    assert (attempt._why_stop(), log.saving) == ("", Saving.FAILED)
    attempt.held.standing = Standing.HELD  # nobody waits for it any more
    assert (attempt._why_stop(), log.saving) == ("", Saving.NONE)


def test_why_a_worker_must_go(bench):
    attempt = bench.attempt
    assert (attempt._why_stop(), attempt._why_end()) == ("", "")
    attempt.held.standing = Standing.CANCELLED
    assert attempt._why_stop() == "it was cancelled"
    bench.agent.control.state = RunState.KILLED
    assert attempt._why_end() == "ended by pipefill kill"
    attempt.held.standing = Standing.LOST
    assert "another agent may have it" in attempt._why_end()
    bench.agent.over = True
    assert attempt._why_stop() == "the main job ended first"


def test_what_runs_is_written_down_with_what_it_did_so_far(tmp_path):
    bench = Bench()
    attempt = bench.attempt
    bench.agent.spec = SimpleNamespace(rank=3)
    attempt.job = SimpleNamespace(  # type: ignore[assignment]
        id=7, name="pi", attempt=2, spec={"task": "m:C", "command": None}, progress=Progress(unit="points")
    )
    attempt.directory, attempt.started_ns = tmp_path, 5
    attempt.limiter = SimpleNamespace(peak_bytes=9)  # type: ignore[assignment]
    for number in range(3000):
        attempt.log.step_ended(number, number + 1, 2.0, alone=False)
    attempt.log.leave_bubble(BubbleUse(1, 5, 3000, 0, 3000), alone=False)
    job, worker = attempt.so_far()
    assert (job.name, job.state, job.reason, job.rank, job.attempt) == ("pi", JobState.RUNNING, "", 3, 2)
    assert (job.work_done, job.unit, job.steps, job.directory) == (6000.0, "points", 3000, str(tmp_path))
    assert job.peak_bytes == 9
    assert (worker.steps_done, worker.work_done, worker.harvested_ns, len(worker.uses)) == (3000, 6000.0, 3000, 1)
    assert len(worker.steps) == 2000  # the most recent ones
    assert worker.steps[-1] == (2999, 3000)


def test_an_agent_keeps_what_it_cannot_write_now(tmp_path):
    agent = Agent.__new__(Agent)
    agent._lock = threading.Lock()
    agent._ended = []
    agent._record = AgentFile(tmp_path / "1", 0)
    running = JobRecord("runs", "m:C", JobState.RUNNING, "", 1.0, "steps", 0, directory="jobs/runs-2")
    worker = WorkerRecord("pi", 0, 1, 1.0, 1, 0, 0.0)
    agent.seats = [
        SimpleNamespace(attempt=SimpleNamespace(so_far=lambda: (running, worker))),
        SimpleNamespace(attempt=None),
    ]  # type: ignore[list-item]
    ended = [replace(running, name=name, state=JobState.QUEUED, directory=f"jobs/{name}-1") for name in ("a", "b")]
    (tmp_path / "1").touch()
    for job in ended:
        agent.keep_record(job, worker)
        with pytest.raises(OSError, match="1"):
            agent._write()
    (tmp_path / "1").unlink()
    agent._write()
    agent._write()
    assert [job for job, _ in read_agent(tmp_path / "1" / "agent0.jsonl")] == ended
    assert [job for job, _ in read_agent(tmp_path / "1" / "agent0.running.jsonl")] == [running]
