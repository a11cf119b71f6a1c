"""How a job runs and how its end is judged: what was cut off goes back, what only ever dies does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megatron.fill.agent.agent import show_or_log
from megatron.fill.agent.ending import Ending, How
from megatron.fill.agent.folder import BoundedOutput
from megatron.fill.agent.ledger import AttemptLedger
from megatron.fill.agent.run import JobRun
from megatron.fill.agent.watch import End, JobWorker, Judge, StopRequests
from megatron.fill.device.port import Limits
from megatron.fill.pages.control import RunState
from megatron.fill.pages.lastword import LastWord
from megatron.fill.pages.steplog import Saving, StepLog, create_log
from megatron.fill.records.agent import AgentFile, read_agent
from megatron.fill.status import Cause, JobState, Status, Then
from megatron.fill.store.values import Claim, Progress, Standing
from megatron.fill.types import BubbleUse, JobRecord, WorkerRecord
from megatron.fill.work import Work
from megatron.fill.worker.spec import Outcome
from tests.support.posts import Post, post

DIED = Outcome(Cause.SIGNAL, "SIGSEGV in run_next_step()")
GAVE_BACK = Outcome(Cause.STOPPED, then=Then.SAVED)
DONE = Outcome(Cause.FINISHED)


def stop(cause: Cause, detail: str = "") -> Ending:
    return Ending(How.STOP, cause, detail)


class Bench:
    """A judge and a job."""

    def __init__(self, post: Post) -> None:
        self.post, self.judge_ = post, Judge()
        self.job = post.submit()

    def judge(self, outcome: Outcome, **more: Any) -> tuple[JobState, str]:
        status = self.judge_.verdict(self.job, End(outcome, **more))
        return status.state, status.text

    def run(self, pid: int = 0, **spec: Any) -> JobRun:
        """One whose worker is the process ``pid``; the test speaks for it."""
        claim = self.post.claim("running", **spec)
        run = JobRun(self.post.context, self.post.pool, self.post.judge, claim, None)
        run.started_ns = time.monotonic_ns()
        log = StepLog(create_log())
        requests = StopRequests(self.post.context, run.held, log, run.started_ns)
        limiter = self.post.context.device.limiter(Limits(), f"test-{claim.job.id}")
        output = BoundedOutput(self.post.folder / "output.log")
        process: Any = None
        command = claim.job.work.command is not None
        run._worker = JobWorker(process, pid, self.post.folder, log, output, limiter, requests, command=command)
        return run


@pytest.fixture
def bench(monkeypatch, tmp_path) -> Iterator[Bench]:
    with post(tmp_path) as made:
        yield Bench(made)


def test_what_a_worker_says_of_itself_is_taken(bench):
    assert bench.judge(DONE) == (JobState.SUCCEEDED, "")
    assert bench.judge(Outcome(Cause.FAILED, "ValueError")) == (JobState.FAILED, "ValueError")
    unfit = bench.judge_.verdict(bench.job, End(Outcome(Cause.DOES_NOT_FIT, "too long")))
    assert unfit == Status(JobState.QUEUED, Cause.DOES_NOT_FIT, "too long")


def test_a_job_that_dies_is_tried_again_twice(bench):
    again = f"{DIED.status.text}; it is tried again"
    assert [bench.judge(DIED) for _ in range(2)] == [(JobState.QUEUED, again)] * 2
    state, reason = bench.judge(DIED)
    assert state is JobState.FAILED
    assert reason == f"{DIED.status.text}, 3 times in a row without having saved anything"


def test_one_that_saves_between_its_deaths_goes_on(bench):
    for _ in range(5):
        assert bench.judge(DIED, saved=True)[0] is JobState.QUEUED


def test_what_it_claims_to_have_saved_does_not_keep_it_going_for_ever(bench):
    states = [bench.judge(DIED, saved=True)[0] for _ in range(12)]
    assert states == [JobState.QUEUED] * 11 + [JobState.FAILED]


def test_a_worker_that_gives_up_unasked_has_died(bench):
    for _ in range(2):
        assert bench.judge(GAVE_BACK)[1] == "the worker gave up without being asked to; it is tried again"
    assert bench.judge(GAVE_BACK)[0] is JobState.FAILED
    # What it scribbles into the log about memory is not a request.
    other = Bench(bench.post)
    assert other.judge(Outcome(Cause.CROWDED))[1].startswith("the worker gave up")


def test_one_that_was_asked_to_stop_says_why(bench):
    assert bench.judge(GAVE_BACK, ending=stop(Cause.MEMORY_NEEDED, "the main job needs the memory"))[1] == (
        "the main job needs the memory; goes on from its checkpoint"
    )
    crowded = Outcome(Cause.CROWDED, then=Then.RESTARTS)
    assert bench.judge(crowded, request="the main job grew") == (
        JobState.QUEUED,
        "the main job grew; it begins again from its start",
    )
    for _ in range(5):
        assert bench.judge(GAVE_BACK, over=Cause.TRAINING_ENDED) == (
            JobState.QUEUED,
            "the main job ended first; goes on from its checkpoint",
        )
    assert bench.judge(GAVE_BACK, over=Cause.WARDEN_DIED) == (
        JobState.QUEUED,
        "the warden of its agent died; goes on from its checkpoint",
    )


def test_one_that_was_cut_off_is_not_to_blame(bench):
    killed = Outcome(Cause.KILLED)
    assert bench.judge(killed, ending=Ending(How.CUT, Cause.KILLED), kept=True) == (
        JobState.QUEUED,
        "ended by pipefill kill; it goes on from its last checkpoint",
    )
    assert bench.judge(DIED, ending=stop(Cause.TRAINING_ENDED)) == (
        JobState.QUEUED,
        "the main job ended first; it begins again",
    )


def test_one_that_was_ended_for_what_it_did_has_failed(bench):
    beyond = Outcome(Cause.LIMIT, "over its cap of 1 MiB")
    ending = Ending(How.FAIL, beyond.cause, beyond.detail)
    assert bench.judge(beyond, ending=ending) == (JobState.FAILED, beyond.detail)
    assert bench.judge(beyond, ending=replace(ending, stop=Cause.TRAINING_ENDED)) == (JobState.FAILED, beyond.detail)


def test_a_cancelled_job_is_cancelled_unless_it_was_done(bench):
    cancelled = {"standing": Standing.CANCELLED, "ending": stop(Cause.CANCELLED)}
    assert bench.judge(GAVE_BACK, **cancelled) == (JobState.CANCELLED, "cancelled while it ran")
    assert bench.judge(DONE, **cancelled)[0] is JobState.SUCCEEDED


def test_one_that_failed_is_tried_again_as_often_as_it_asks_for(bench):
    bench.job = replace(bench.job, work=Work(retries=2))
    wrong = Outcome(Cause.FAILED, "ValueError")
    status = bench.judge_.verdict(bench.job, End(wrong))
    assert status == Status(JobState.QUEUED, Cause.FAILED, "ValueError", retry=1, retries=2)
    assert status.failed
    bench.job = replace(bench.job, progress=Progress(failures=1))
    assert bench.judge(wrong) == (JobState.QUEUED, "ValueError; retry 2 of 2")
    bench.job = replace(bench.job, progress=Progress(failures=2))
    assert bench.judge(wrong) == (JobState.FAILED, "ValueError")
    assert bench.judge(DONE) == (JobState.SUCCEEDED, "")


def test_each_try_may_die_as_often_as_the_first(bench):
    bench.job = replace(bench.job, work=Work(retries=1))
    reasons = [bench.judge(DIED)[1].rpartition("; ")[2] for _ in range(6)]
    again = "it is tried again"
    assert reasons == [again, again, "retry 1 of 1", again, again, "retry 1 of 1"]  # the store counts them


def test_a_job_that_runs_for_too_long_has_failed(bench):
    run = bench.run(timeout_s=60)
    requests = run._worker.requests
    assert requests.look() is None
    bench.job = run.job
    ending = StopRequests(bench.post.context, run.held, run._worker.log, time.monotonic_ns() - 61 * 10**9).look()
    assert ending == stop(Cause.TIMEOUT, "60")
    failed = (JobState.FAILED, "it ran for longer than its timeout of 60 s")
    assert bench.judge(GAVE_BACK, ending=ending) == failed
    assert bench.judge(DIED, ending=ending) == failed
    for how in (How.LATE, How.FAIL, How.CUT):  # whatever came after that
        assert bench.judge(DIED, ending=Ending(how, Cause.LATE, "another reason", ending.cause)) == failed
    assert bench.judge(DONE, ending=ending)[0] is JobState.SUCCEEDED
    bench.job = replace(bench.job, work=replace(bench.job.work, retries=1))
    assert bench.judge(GAVE_BACK, ending=ending)[0] is JobState.QUEUED


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
    run = bench.run(task.pid)
    run._worker.ask_to_shrink(0)  # all of it: that is a wish, too
    assert run._worker.log.wanted_bytes == 0
    assert run._worker.shrinking()
    assert task.stdout.readline() == "asked\n"
    assert task.wait() == 0
    run._worker.ask_to_shrink(None)  # it has ended just now
    assert run._worker.log.wanted_bytes == 0
    run._worker.log.wanted_bytes = None
    assert not run._worker.shrinking()


def test_a_command_cannot_shrink_and_is_not_signalled(bench, monkeypatch):
    sent: list[signal.Signals] = []
    run = bench.run(task=None, command=("sleep", "1"))
    monkeypatch.setattr(JobWorker, "_signal", lambda self, number: sent.append(number))
    run._worker.ask_to_shrink(1)
    assert (sent, run._worker.log.wanted_bytes) == ([], None)


def test_a_job_that_moves_goes_on_from_its_checkpoint(bench):
    moves = stop(Cause.MOVES)
    again = (JobState.QUEUED, "it moves to a rank that is idle; goes on from its checkpoint")
    assert bench.judge(GAVE_BACK, ending=moves) == again
    assert bench.judge(DONE, ending=moves)[0] is JobState.SUCCEEDED
    assert [bench.judge(DIED)[0] for _ in range(2)] == [JobState.QUEUED] * 2  # no move counted


def test_one_that_is_too_slow_to_stop_moves_all_the_same(bench):
    """It was saved before, and it is not to blame for a machine that is busy."""
    slow = Outcome(Cause.LATE, "stop() did not return within 10 s of the stop: ...")

    def late(stop: Cause, how: How = How.LATE) -> Ending:
        return Ending(how, slow.cause, slow.detail, stop)

    queued = (JobState.QUEUED, "it moves to a rank that is idle; it goes on from its last checkpoint")
    assert bench.judge(slow, ending=late(Cause.MOVES), kept=True) == queued
    assert bench.judge(slow, ending=late(Cause.MOVES, How.FAIL))[0] is JobState.FAILED  # ended for another reason
    for over in (Cause.TRAINING_ENDED, Cause.WARDEN_DIED, Cause.KEEPER_DIED):
        assert bench.judge(slow, ending=late(over))[0] is JobState.QUEUED
    assert bench.judge(slow, ending=late(Cause.MEMORY_NEEDED))[0] is JobState.FAILED


def test_a_job_moves_only_after_it_was_saved_anew(bench):
    run = bench.run()
    log, look = run._worker.log, run._worker.requests.look
    log.saving = Saving.SAVED  # for an earlier request, say
    assert (look(), log.saving) == (None, Saving.NONE)
    run.held.standing = Standing.MOVE
    assert (look(), log.saving) == (None, Saving.WANTED)
    assert look() is None
    log.saving = Saving.SAVED
    assert look() == stop(Cause.MOVES)
    log.saving = Saving.FAILED
    assert (look(), log.saving) == (None, Saving.FAILED)
    run.held.standing = Standing.HELD  # nobody waits for it any more
    assert (look(), log.saving) == (None, Saving.NONE)


def test_that_the_rank_has_died_is_not_said_of_its_agents_warden_or_keeper(bench):
    context = bench.post.context
    context.orphaned.set()
    assert replace(context, guard=os.getppid()).over is Cause.TRAINING_ENDED
    gone = os.getpid()  # not the parent of this process, or not any more
    assert replace(context, guard=gone, spec=replace(context.spec, parent=os.getppid())).over is Cause.WARDEN_DIED
    assert replace(context, guard=gone, spec=replace(context.spec, parent=gone)).over is Cause.KEEPER_DIED


def test_an_agent_that_alone_is_to_end_is_followed_by_another(bench):
    context = replace(bench.post.context, guard=os.getppid())
    assert not context.dismissed
    context.orphaned.set()
    assert context.dismissed
    assert not replace(context, guard=os.getpid()).dismissed  # its guard has died
    bench.post.gate.end()
    assert not context.dismissed


def test_why_a_worker_must_go(bench):
    run = bench.run()
    look = run._worker.requests.look
    assert look() is None
    run.held.standing = Standing.CANCELLED
    assert look() == stop(Cause.CANCELLED)
    bench.post.context.orphaned.set()
    assert look() == stop(Cause.TRAINING_ENDED)
    context = bench.post.context
    run._worker.requests.context = replace(context, guard=os.getpid(), spec=replace(context.spec, parent=os.getppid()))
    assert look() == stop(Cause.WARDEN_DIED)
    bench.post.gate.end()
    assert look() == stop(Cause.TRAINING_ENDED)
    bench.post.control.change(RunState.KILLED)
    assert look() == Ending(How.CUT, Cause.KILLED)
    run.held.standing = Standing.LOST
    assert look() == Ending(How.CUT, Cause.CLAIM_LOST)


def test_what_runs_is_written_down_with_what_it_did_so_far(bench):
    run = bench.run()
    log = run._worker.log
    for number in range(3000):
        log.step_ended(number, number + 1, 2.0, alone=False)
    log.leave_bubble(BubbleUse(1, 5, 3000, 0, 3000), alone=False)
    log.unit = "points"
    job, worker = run.so_far()
    assert (job.name, job.state, job.reason, job.rank, job.attempt) == ("running", JobState.RUNNING, "", 3, 1)
    assert (job.work_done, job.unit, job.steps, job.directory) == (6000.0, "points", 3000, str(bench.post.folder))
    assert (worker.steps_done, worker.work_done, worker.harvested_ns, len(worker.uses)) == (3000, 6000.0, 3000, 1)
    assert len(worker.steps) == 2000  # the most recent ones
    assert worker.steps[-1] == (2999, 3000)


def test_time_alone_on_the_device_is_progress_and_not_harvest(bench):
    run = bench.run()
    log = run._worker.log
    log.step_ended(1_000, 3_000, 1.0, alone=True)
    log.leave_bubble(BubbleUse(1, 5, 3_000, 0, 1), alone=False)
    assert run.progress().harvested_s == 5e-6
    assert run.so_far()[0].harvested_s == 3e-6


def test_what_a_running_job_is_said_to_have_done_is_what_its_worker_is_said_to_have_done(bench):
    """Whatever it does while it is written down."""
    run = bench.run()
    log, done = run._worker.log, threading.Event()
    log.step_ended(1, 2, 1.0, alone=True)

    def step() -> None:
        while not done.is_set():
            log.step_ended(1, 2, 1.0, alone=False)

    thread = threading.Thread(target=step)
    thread.start()
    try:
        found = [run.so_far() for _ in range(20)]
    finally:
        done.set()
        thread.join()
    assert found[-1][0].steps > found[0][0].steps
    for job, worker in found:
        assert (job.steps, job.work_done) == (worker.steps_done + 1, worker.work_done + 1)


def test_one_that_has_not_begun_has_no_record_and_is_as_far_as_before(bench):
    claim = bench.post.claim("waits")
    claim = Claim(replace(claim.job, progress=Progress(work_done=3.0, failures=1)), "agent")
    run = JobRun(bench.post.context, bench.post.pool, bench.post.judge, claim, None)
    assert run.so_far() is None
    assert run.progress() == claim.job.progress


def test_an_agent_keeps_what_it_cannot_write_now(tmp_path):
    ledger = AttemptLedger(AgentFile(tmp_path / "1", 0), LastWord.create())
    runs = JobRecord("runs", "m:C", Status(JobState.RUNNING), 1.0, "steps", 0, directory="jobs/runs-2")
    worker = WorkerRecord("pi", 0, 1, 1.0, 1, 0, 0.0)
    ended = [
        replace(runs, name=name, status=Status(JobState.QUEUED), directory=f"jobs/{name}-1") for name in ("a", "b")
    ]
    (tmp_path / "1").touch()
    with ledger.running(lambda: (runs, worker)), ledger.running(lambda: None):
        for job in ended:
            ledger.keep(job, worker)
            with pytest.raises(OSError, match="1"):
                ledger.write()
        (tmp_path / "1").unlink()
        ledger.write()
        ledger.write()
        assert [job for job, _ in read_agent(tmp_path / "1" / "agent0.jsonl")] == ended
        assert [job for job, _ in read_agent(tmp_path / "1" / "agent0.running.jsonl")] == [runs]
    ledger.write()
    assert not (tmp_path / "1" / "agent0.running.jsonl").exists()


@pytest.mark.parametrize(
    ("error", "traced"), [(OSError(28, "No space left on device"), False), (KeyError("of ours"), True)]
)
def test_a_full_disk_is_said_in_a_line_and_a_fault_of_our_own_with_where_it_is(caplog, error, traced):
    def show() -> None:
        raise error

    show_or_log(show)
    [record] = caplog.records
    assert "cannot be shown now" in record.getMessage()
    assert (record.exc_info is not None) is traced
