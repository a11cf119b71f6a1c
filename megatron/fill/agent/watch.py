"""A worker that has its job: watched to its end, ended where it must be; and what becomes of the job then."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.fill import untrusted
from megatron.fill.agent.claims import HeldClaim
from megatron.fill.agent.context import AgentContext
from megatron.fill.agent.ending import Ending, How, Watcher
from megatron.fill.agent.enforcer import Enforcer
from megatron.fill.agent.folder import BoundedOutput
from megatron.fill.device.port import Limiter
from megatron.fill.linux.wakeup import readable
from megatron.fill.pages.control import RunState
from megatron.fill.pages.steplog import Saving, StepLog
from megatron.fill.sidetask.base import RESULT
from megatron.fill.status import Cause, JobState, Status, Then, why
from megatron.fill.store.values import Job, Progress, Standing
from megatron.fill.worker.spec import Outcome

TICK_S = 0.2
STOP_S = 10.0  # time limit for a worker to save and stop
_READ_BYTES = 64 * 1024  # what a pipe holds
_REST_S = 0.005  # between two reads of the output: a job that prints line by line must not wake this process for each
_ABORT_S = 0.1  # time for a hung task to write its traceback
_CRASHES = 3  # crashes in a row without a checkpoint in between, after which the job has failed
_ALL_CRASHES = 12  # crashes in all, after which it has failed in spite of checkpoints


def harshest(watchers: Iterable[Watcher]) -> Ending | None:
    """Ask all watchers, and return the most severe decision (the first one if several are as severe)."""
    found = [ending for watcher in watchers if (ending := watcher.look()) is not None]
    return max(found, key=lambda ending: ending.how, default=None)


@dataclass(eq=False, repr=False)
class StopRequests:
    """Watches one job for requests to end it (Watcher)."""

    context: AgentContext
    held: HeldClaim  # the claim, in which the thread of ``Claims`` records the store's answers
    log: StepLog
    started_ns: int  # start of the attempt, CLOCK_MONOTONIC

    def __post_init__(self) -> None:
        self._timeout_s = self.held.claim.job.work.timeout_s or math.inf
        self._until_ns = self.started_ns + self._timeout_s * 1e9

    def look(self) -> Ending | None:
        if self.held.standing is Standing.LOST:
            return Ending(How.CUT, Cause.CLAIM_LOST)
        if self.context.control.state is RunState.KILLED:
            return Ending(How.CUT, Cause.KILLED)
        if over := self.context.over:
            return Ending(How.STOP, over)
        if self.held.standing is Standing.CANCELLED:
            return Ending(How.STOP, Cause.CANCELLED)
        if time.monotonic_ns() > self._until_ns:
            return Ending(How.STOP, Cause.TIMEOUT, f"{self._timeout_s:g}")
        return Ending(How.STOP, Cause.MOVES) if self._may_move() else None

    def _may_move(self) -> bool:
        """True if another rank has asked for the job and it has been saved since, so that a move costs no work."""
        if self.held.standing is not Standing.MOVE:
            self.log.saving = Saving.NONE
        elif self.log.saving is Saving.NONE:
            self.log.saving = Saving.WANTED
        return self.log.saving is Saving.SAVED


@dataclass(eq=False, repr=False)
class JobWorker:
    """A worker that has its job; for one thread."""

    process: subprocess.Popen[bytes]  # its first process, which leads a process group and has its output on a pipe
    pid: int  # the job's process and process group
    directory: Path  # the job's folder
    log: StepLog
    output: BoundedOutput
    limiter: Limiter  # enforces the limits until the worker is asked to stop
    requests: Watcher  # requests from outside to end the job
    command: bool  # the job is a command
    stop_s: float = STOP_S  # time limit for the worker to save and stop

    def __post_init__(self) -> None:
        self.ending: Ending | None = None  # the decision to end the worker; None while there is none
        self.ended_ns = 0  # time of its end, CLOCK_MONOTONIC
        self._killed_by_kernel = ""  # the limiter's explanation of an end by the kernel
        self._deadline_s = 0.0  # latest time to stop

    def ask_to_stop(self) -> None:
        """Ask the job to stop: a task saves its state; the first process of a command's worker reports its progress."""
        if self.command:
            self.process.terminate()
        else:
            self._signal(signal.SIGTERM)

    def ask_to_shrink(self, to_bytes: int | None) -> None:
        """Ask the task to give memory back; a signal makes it look at the request.  A command cannot give any back."""
        if not self.command:
            if to_bytes is not None:
                self.log.wanted_bytes = to_bytes
            self._signal(signal.SIGUSR1)

    def shrinking(self) -> bool:
        return self.log.wanted_bytes is not None

    def watch(self, enforcer: Enforcer, memory: Watcher, tick: Callable[[], None]) -> None:
        """Wait for the worker's end, and end it if a watcher decides so; call ``tick`` every ``TICK_S`` seconds.

        No process of the worker is left, whatever is raised.
        """
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            try:
                self._stay(stdout.fileno(), enforcer, memory, tick)
                self.ended_ns = time.monotonic_ns()
                self._killed_by_kernel = self.limiter.explain()
            finally:
                self._kill()
            while self._pump(stdout.fileno()) and not self.output.full:
                pass

    def _stay(self, pipe: int, enforcer: Enforcer, memory: Watcher, tick: Callable[[], None]) -> None:
        """Return when the worker's first process has ended."""
        os.set_blocking(pipe, False)
        watchers = self.requests, memory, self.output
        tick_s, look_s = time.monotonic(), TICK_S
        exit_fd = os.pidfd_open(self.process.pid)
        awaited = [exit_fd, pipe]
        try:
            while self.process.poll() is None:
                if pipe in readable(min(look_s, TICK_S), *awaited):
                    if not self._pump(pipe) or self.output.full:
                        awaited.remove(pipe)
                    readable(_REST_S, exit_fd)
                now_s = time.monotonic()
                if now_s - tick_s >= TICK_S:
                    tick_s = now_s
                    tick()
                    self._decide(watchers, enforcer, now_s)
                if self.ending is None:  # after the rules, which may have stopped the worker
                    look_s = enforcer.check()
        finally:
            os.close(exit_fd)

    def _decide(self, watchers: Sequence[Watcher], enforcer: Enforcer, now_s: float) -> None:
        before, found = self.ending, harshest(watchers)
        if before is None:
            if found is None and (beyond := self.limiter.look()):
                found = Ending(How.FAIL, Cause.LIMIT, beyond)
            self.ending = found = found or enforcer.look()
            if found is not None and found.how is How.STOP:
                enforcer.release()
                self.ask_to_stop()
                self._deadline_s = now_s + self.stop_s
            elif found is not None:
                if found.cause is Cause.HUNG and not self.command:
                    self._abort()
                self._kill()
        elif found is not None and found.how > How.STOP:
            self.ending = replace(found, stop=before.cause)
            self._kill()
        elif now_s > self._deadline_s:
            stop = why(before.cause, before.detail)
            late = f"{self.log.phase.callback} did not return within {self.stop_s:g} s of the stop: {stop}"
            self.ending = Ending(How.LATE, Cause.LATE, late, before.cause)
            self._kill()

    def _pump(self, pipe: int) -> bool:
        """Move some output to its file; False at its end, or if there is none now."""
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        self.output.write(data)
        return bool(data)

    def _abort(self) -> None:
        """Let a hung task write where it hangs: SIGABRT makes Python write a traceback and end, SIGKILL does not.

        One that does otherwise with the signal runs outside bubbles for ``_ABORT_S``, at idle priority, and once.
        """
        self._signal(signal.SIGABRT)
        self._signal(signal.SIGCONT)  # it is stopped outside bubbles
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_ABORT_S)

    def _kill(self) -> None:
        try:
            self.limiter.kill()
        finally:
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def outcome(self) -> Outcome:
        """Return the worker's report; if it left none, or the agent killed it, the cause of its end instead."""
        left = Outcome.left(self.log)
        result = (left.result if left else {}) or _read_result(self.directory)
        if self.ending is not None and self.ending.how > How.STOP:
            cause, detail = self.ending.cause, self.ending.detail
        elif left is not None:
            return replace(left, result=result)
        else:
            cause, detail = self._death()
        return Outcome(cause, detail, unit=left.unit if left else self.log.unit, result=result)

    def _death(self) -> tuple[Cause, str]:
        if self._killed_by_kernel:
            return Cause.OUT_OF_MEMORY, self._killed_by_kernel
        code, callback = self.process.returncode, self.log.phase.callback
        where = f"{'in ' * callback.endswith(')')}{callback}"
        if code < 0:
            with contextlib.suppress(ValueError):
                return Cause.SIGNAL, f"{signal.Signals(-code).name} {where}"
        return Cause.EXITED, f"{code} {where}"


@dataclass(frozen=True, slots=True)
class End:
    """The end of a worker."""

    outcome: Outcome  # the worker's own report, or a substitute if it left none or was killed
    ending: Ending | None = None  # the agent's decision to end it; None if it ended by itself
    standing: Standing = Standing.HELD  # state of the claim at the end
    saved: bool = False  # this attempt left a checkpoint
    kept: bool = False  # there is a checkpoint, of this or an earlier attempt
    request: str = ""  # reason of a request to give memory back to the training; empty if there was none
    over: Cause = Cause.NONE  # as ``AgentContext.over``
    unfit: bool = False  # the job must not be tried here again before the bubble cycle changes
    violations: int = 0  # number of violations of the worker's bubbles (``Enforcer``)


class Judge:
    """Decides on the jobs of one agent, and counts their crashes there; each job is for one thread at a time."""

    def __init__(self) -> None:
        self._deaths: dict[int, tuple[int, int]] = {}  # by job: in a row, and in all

    def verdict(self, job: Job, end: End) -> Status:
        """Return the job's new status; a job that has failed is queued again for as many retries as it asks for."""
        status = self._judge(job, end)
        if status.state is not JobState.FAILED:
            return status
        self._deaths.pop(job.id, None)
        before, most = job.progress.failures, job.work.retries
        return status if before >= most else replace(status, state=JobState.QUEUED, retry=before + 1, retries=most)

    def _judge(self, job: Job, end: End) -> Status:
        outcome = end.outcome
        if outcome.cause is Cause.FINISHED:
            return outcome.status
        if end.standing is Standing.CANCELLED:
            return Status(JobState.CANCELLED, Cause.CANCELLED_RUNNING)
        gave_back = outcome.cause in (Cause.STOPPED, Cause.CROWDED)
        again = Then.RESUMES if end.kept else Then.BEGINS_AGAIN
        match end.ending:
            case Ending(How.STOP, Cause.TIMEOUT) | Ending(stop=Cause.TIMEOUT):
                return Status(JobState.FAILED, Cause.TIMEOUT, f"{job.work.timeout_s:g}")
            case Ending(How.CUT, cause, detail):
                return Status(JobState.QUEUED, cause, detail, again)
            # On a busy machine a job may be slow to stop through no fault of its own.
            case Ending(
                How.LATE, stop=(Cause.MOVES | Cause.TRAINING_ENDED | Cause.WARDEN_DIED | Cause.KEEPER_DIED) as cause
            ):
                return Status(JobState.QUEUED, cause, then=again)
            case Ending(How.STOP, cause, detail) if outcome.cause.died:
                return Status(JobState.QUEUED, cause, detail, again)
            case Ending(How.STOP, cause, detail) if gave_back:
                return Status(JobState.QUEUED, cause, detail, outcome.then)
        if gave_back and end.over:
            return Status(JobState.QUEUED, end.over, then=outcome.then)
        if outcome.cause is Cause.CROWDED and end.request:
            return Status(JobState.QUEUED, Cause.MEMORY_NEEDED, end.request, outcome.then)
        if gave_back:
            return self._died(job, Status(JobState.FAILED, Cause.GAVE_UP), end.saved)
        return self._died(job, outcome.status, end.saved) if outcome.cause.died else outcome.status

    def _died(self, job: Job, status: Status, saved: bool) -> Status:
        in_a_row, in_all = self._deaths.get(job.id, (0, 0))
        self._deaths[job.id] = in_a_row, in_all = (1 if saved else in_a_row + 1), in_all + 1
        if in_a_row >= _CRASHES:
            return replace(status, then=Then.DIED_IN_A_ROW, deaths=_CRASHES)
        if in_all >= _ALL_CRASHES:
            return replace(status, then=Then.DIED_TOO_OFTEN, deaths=_ALL_CRASHES)
        return replace(status, state=JobState.QUEUED, then=Then.TRIED_AGAIN)


def _read_result(directory: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        result = untrusted.read_json(directory / RESULT)
        return result if isinstance(result, dict) else {}
    return {}


def progress_of(job: Job, log: StepLog, began_s: float) -> Progress:
    """Return the job's progress, from the step log of its worker, which began at ``began_s`` (``time.monotonic``)."""
    # Before the checkpoint is loaded, the log does not include earlier work.
    began, before = bool(log.serving_ns), job.progress  # nor while its nodes are measured
    elapsed_s, startup_s = time.monotonic() - began_s, log.serving_ns / 1e9 - began_s
    return Progress(
        work_done=log.base_work + log.work_done if began else before.work_done,
        total_work=log.total_work or before.total_work,
        unit=log.unit or before.unit,
        rate=log.work_done / elapsed_s if log.work_done and elapsed_s > 0 else before.rate,
        steps=before.steps + log.step_count,
        harvested_s=before.harvested_s + log.device_ns / 1e9,
        checkpoint_s=log.checkpoint_s or before.checkpoint_s,
        resumable=bool(log.resumable),
        startup_s=startup_s if 0 <= startup_s <= elapsed_s else None,
        failures=before.failures,
    )
