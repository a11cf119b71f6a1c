"""An attempt to run a job: starts its worker, watches it and returns how it ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.fill.agent.claims import HeldClaim
from megatron.fill.agent.context import AgentContext
from megatron.fill.agent.ending import End, How, starting
from megatron.fill.agent.enforcer import Enforcer, Overtime
from megatron.fill.agent.folder import BoundedOutput
from megatron.fill.agent.forecast import JobForecast, progress_of
from megatron.fill.agent.ledger import Record
from megatron.fill.agent.memory import MemoryShare
from megatron.fill.agent.ranking import Resident
from megatron.fill.agent.watch import Orders, Watch
from megatron.fill.agent.workers import WorkerPool, WorkerProcess, write_spec
from megatron.fill.device.port import Limiter, Limits
from megatron.fill.folders import output_file
from megatron.fill.pages.steplog import StepLog, create_log
from megatron.fill.status import Cause, JobState, Status, why
from megatron.fill.store.port import Claim, Progress
from megatron.fill.types import JobRecord, WorkerRecord
from megatron.fill.worker.spec import Confined

logger = logging.getLogger("pipefill.agent")

_CONFINED_S, _LOOK_S = 60.0, 0.2  # time limit for setting up the sandbox, on a busy machine; time between two looks
_MOST_SAID = 2000  # most characters of a worker's last output that are logged
_SHOWN = 2000  # number of recent bubbles and steps in the record of a running job


@dataclass(frozen=True, slots=True)
class _Begun:
    """The parts of an attempt whose job has begun or may begin.

    Attributes:
        command: the job is a command.
    """

    command: bool
    worker: WorkerProcess
    confined: Confined
    limiter: Limiter
    log: StepLog
    output: BoundedOutput
    orders: Orders

    def ask_to_stop(self) -> None:
        """Ask the job to stop: a task saves its state; the first process of a command's worker reports its progress."""
        if self.command:
            self.worker.process.terminate()
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

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.confined.pid, number)


class Attempt:
    """An attempt to run a claimed job, in a seat.

    The seat's thread calls ``run``.  Any thread may use ``progress``, ``so_far``, ``resident`` and ``forecast`` in the
    meantime.

    Args:
        directory: the job's folder, ready.
        beside: the resident job if this one is a tail job; None if it is itself the resident job.

    Attributes:
        resident: the job and its folder while it runs; None before and after.
    """

    def __init__(
        self,
        context: AgentContext,
        pool: WorkerPool,
        claim: Claim,
        limits: Limits,
        directory: Path,
        beside: Resident | None,
    ) -> None:
        self.context = context
        self.pool = pool
        self.job = claim.job
        self.limits = limits
        self.directory = directory
        self.beside = beside
        self.held = HeldClaim(claim, self.progress)
        self.started_ns, self.started_s = time.monotonic_ns(), time.time()
        self.forecast = JobForecast(context, claim.job, directory, self.progress)
        self.resident: Resident | None = None
        self._begun: _Begun | None = None

    def run(self) -> End:
        """Run the job until its worker has ended; no process of it is left, whatever is raised.

        Raises:
            NotStarted: the job did not begin.
        """
        with contextlib.ExitStack() as always, contextlib.ExitStack() as on_failure:
            with starting():
                self._begun = begun = self._start(always, on_failure)
            self.resident = Resident(self.job, self.directory)
            try:
                end = self._stay(begun)
            finally:
                self.resident = None
            on_failure.pop_all()
            return end

    @property
    def stepped(self) -> bool:
        """True if the job has done a step, according to its worker."""
        return self._begun is not None and self._begun.log.step_count > 0

    def progress(self) -> Progress:
        """Return the job's progress."""
        begun = self._begun
        return self.job.progress if begun is None else progress_of(self.job, begun.log, self.started_ns / 1e9)

    def so_far(self) -> Record | None:
        """Return the record of a running job; None before it may begin."""
        if (begun := self._begun) is None:
            return None
        unit = begun.log.unit or self.job.progress.unit
        worker = begun.log.record(self.job.name, self.context.spec.rank, _SHOWN)
        record = self._record(begun, worker, Status(JobState.RUNNING))
        return replace(record, unit=unit, total_work=begun.log.total_work), worker

    def record(self, status: Status, end: End) -> Record:
        """Return the record of a job that has ended."""
        assert self._begun is not None
        outcome, worker = end.outcome, self._begun.log.record(self.job.name, self.context.spec.rank)
        record = replace(
            self._record(self._begun, worker, status),
            unit=outcome.unit,
            total_work=outcome.total_work,
            result=outcome.result,
            ended_ns=end.ended_ns,
            offences=end.offences,
        )
        return record, worker

    def _start(self, always: contextlib.ExitStack, on_failure: contextlib.ExitStack) -> _Begun:
        """Start the worker, and let the job begin once it is in its sandbox.

        Args:
            always: clean-up for the end of the attempt.
            on_failure: clean-up that comes before it if the attempt ends with an exception.
        """
        context, job = self.context, self.job
        context.claims.hold(self.held)  # on a busy machine a start may take longer than a lease
        always.callback(context.claims.let_go, self.held)
        worker = always.enter_context(self.pool.worker(job))
        limiter = context.device.limiter(self.limits, worker.name)
        always.callback(limiter.close)
        output = BoundedOutput(output_file(self.directory), context.spec.max_output_bytes)
        always.callback(output.close)
        if self.beside is None:
            always.callback(context.baton.drop)
        on_failure.callback(self._abandon, worker)
        log_fd = create_log()
        try:
            log = StepLog(log_fd)
            orders = Orders(context, self.held, log, self.started_ns)
            spec = write_spec(context, job, self.limits, self.directory, limiter.environment, self.beside)
            worker.give(spec, log_fd)
        finally:
            os.close(log_fd)
        confined = self._confined(worker, orders)
        limiter.adopt(confined.init, worker.pid)
        on_failure.callback(limiter.kill)
        worker.let_go()
        self.pool.stand_by()
        for lacking in confined.lacking:
            logger.info("job %s: %s", job.name, lacking)
        return _Begun(job.work.command is not None, worker, confined, limiter, log, output, orders)

    def _confined(self, worker: WorkerProcess, orders: Orders) -> Confined:
        end_s = time.monotonic() + _CONFINED_S
        while time.monotonic() < end_s:
            ending = orders.look()
            if ending is not None and ending.how is How.CUT:
                raise OSError(why(ending.cause, ending.detail))
            with contextlib.suppress(TimeoutError):
                found = worker.confined(_LOOK_S)
                if found is None:
                    raise OSError("its worker ended before the job could begin")
                if found.error:
                    raise OSError(f"it cannot be kept in: {found.error}")
                return found
        raise OSError(f"its worker was not ready within {_CONFINED_S:g} s")

    def _abandon(self, worker: WorkerProcess) -> None:
        """End a worker whose attempt failed, with all that it started, and log its unread output."""
        if said := worker.end():
            logger.warning("job %s: its worker said: %s", self.job.name, said[-_MOST_SAID:])

    def _stay(self, begun: _Begun) -> End:
        """Watch the worker until it has ended."""
        context, spec, log = self.context, self.context.spec, begun.log
        enforcer = Enforcer(
            begun.confined.pid,
            context.gate,
            log,
            spec.grace_ns,
            spec.max_overruns,
            Overtime(begun.limiter.busy_s, context.gate, max(1, len(spec.cpus))),
            off=lambda: context.gate.braked or not context.control.running,
        )
        promised_bytes = self.job.work.memory_bytes or 0
        with context.memory.shared(begun.limiter, promised_bytes, begun.ask_to_shrink, begun.shrinking) as memory:
            watch = Watch(
                begun.worker.process,
                log,
                self.directory,
                begun.output,
                enforcer,
                begun.limiter,
                begun.ask_to_stop,
                (begun.orders, memory),
                self.forecast.look,
            )
            try:
                watch.watch()
            finally:
                enforcer.close()
        self.forecast.keep_profile()
        return self._end(watch, memory)

    def _end(self, watch: Watch, memory: MemoryShare) -> End:
        outcome = watch.outcome(watch.log.unit)
        saved_s = watch.log.checkpoint_s or 0.0
        return End(
            outcome,
            ending=watch.ending,
            standing=self.held.standing,
            saved=saved_s > self.started_s,
            kept=bool(saved_s or self.job.progress.checkpoint_s),
            request=memory.request,
            over=self.context.over,
            unfit=outcome.cause in (Cause.DOES_NOT_FIT, Cause.CROWDED) or memory.ending is not None,
            offences=watch.enforcer.offences,
            ended_ns=watch.ended_ns,
        )

    def _record(self, begun: _Begun, worker: WorkerRecord, status: Status) -> JobRecord:
        """Return the job's record; its counts are those of ``worker``, since the log itself has changed since then."""
        job, log, now_ns = self.job, begun.log, time.monotonic_ns()
        return JobRecord(
            name=job.name,
            what=job.work.what,
            status=status,
            work_done=worker.work_done + worker.alone_work,
            unit="",
            rank=worker.rank,
            steps=worker.steps_done + log.alone_steps,
            harvested_s=worker.harvested_ns / 1e9,
            directory=str(self.directory),
            ended_s=time.time(),
            attempt=job.attempt,
            started_ns=self.started_ns,
            ready_ns=log.ready_ns if self.started_ns <= log.ready_ns <= now_ns else 0,
            peak_bytes=begun.limiter.peak_bytes,
            side_throughput=job.work.side_throughput,
        )
