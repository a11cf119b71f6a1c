"""A job's run: one attempt, from the claim to the end that the store hears of."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.fill import untrusted
from megatron.fill.agent.admission import refusal
from megatron.fill.agent.claims import HeldClaim
from megatron.fill.agent.context import AgentContext
from megatron.fill.agent.ending import How, NotStarted
from megatron.fill.agent.energy import EnergyShare
from megatron.fill.agent.enforcer import Enforcer, Overtime
from megatron.fill.agent.folder import BoundedOutput, folder_name, job_folder, occupied
from megatron.fill.agent.ledger import Record
from megatron.fill.agent.memory import MemoryShare
from megatron.fill.agent.ranking import Resident
from megatron.fill.agent.watch import End, JobWorker, Judge, StopRequests, progress_of
from megatron.fill.agent.workers import WorkerPool, WorkerProcess, write_spec
from megatron.fill.device.port import Limits
from megatron.fill.folders import PROFILE, output_file
from megatron.fill.pages.steplog import StepLog, create_log
from megatron.fill.profiles import MeasuredJob
from megatron.fill.status import Cause, JobState, Status, Then, why
from megatron.fill.store.queue import JobStore
from megatron.fill.store.values import Claim, Progress, Standing
from megatron.fill.types import JobRecord, WorkerRecord
from megatron.fill.worker.spec import Outcome, SandboxReport

logger = logging.getLogger("pipefill.agent")

_SANDBOX_S, _LOOK_S = 60.0, 0.2  # time limit for setting up the sandbox, on a busy machine; time between two looks
_SAY_S = 8.0  # time for which a store that does not answer is tried while the training goes on
_TELL_S = 5.0  # time between two estimates of the job's end
_MOST_SAID = 2000  # most characters of a worker's last output that are logged
_SHOWN = 2000  # number of recent bubbles and steps in the record of a running job


@dataclass(eq=False, repr=False)
class JobRun:
    """An attempt to run a claimed job.

    The seat's thread calls ``run``; any thread may use the rest in the meantime.
    """

    context: AgentContext
    pool: WorkerPool
    judge: Judge
    claim: Claim
    neighbour: Resident | None  # the resident job if this one is a tail job; None if it is itself the resident job

    def __post_init__(self) -> None:
        self.job = self.claim.job
        self.held = HeldClaim(self.claim, self.progress)
        self.done_at_s = math.inf  # its expected end in seconds since the epoch; infinity if unknown
        self.started_ns, self.started_s = 0, 0.0  # set when the worker is about to be started
        self._worker: JobWorker | None = None  # None until the job begins
        self._energy: EnergyShare | None = None
        self._told_s = 0.0
        self._profile_kept = False

    def run(self) -> None:
        """Run the job if it may run here, and report its end; an exception does not count as the job's failure."""
        context, job = self.context, self.job
        try:
            self._run()
            return
        except NotStarted as error:
            status = error.status
        except Exception as error:
            began = self._worker is not None
            if isinstance(error, OSError) and not began:  # a full disk, say: it may succeed elsewhere, or here later
                status = Status(JobState.QUEUED, Cause.NOT_STARTED, str(error))
            else:
                logger.exception("job %s: its agent failed", job.name)
                cause, then = (Cause.AGENT_FAILED, Then.TRIED_AGAIN) if began else (Cause.NOT_STARTED, Then.NONE)
                status = Status(JobState.QUEUED, cause, f"{type(error).__name__}: {error}", then)
        if status.state is JobState.QUEUED:
            context.ranking.misfits.tried(job.id, self._is_tail)
        logger.warning("job %s: %s %s", job.name, status.state, status.text)
        context.claims.finish(self.claim, status, self._last_progress(), {}, self._say_s)

    @property
    def stepped(self) -> bool:
        """True if the job has done a step, according to its worker."""
        return self._worker is not None and self._worker.log.step_count > 0

    @property
    def resident(self) -> Resident | None:
        """The job and its folder from its first step until its worker ends, otherwise None."""
        worker = self._worker
        if worker is None or worker.ended_ns or not self.stepped:
            return None
        return Resident(self.job, worker.directory)

    def progress(self) -> Progress:
        worker = self._worker
        if worker is None:
            return self.job.progress
        progress = progress_of(self.job, worker.log, self.started_ns / 1e9)
        more_j, before_j = None if self._energy is None else self._energy.joules, self.job.progress.joules
        return replace(progress, joules=before_j if more_j is None else (before_j or 0.0) + more_j)

    def so_far(self) -> Record | None:
        """Return the record of a running job; None before it begins."""
        if (worker := self._worker) is None:
            return None
        log = worker.log
        outcome = Outcome(Cause.NONE, unit=log.unit or self.job.progress.unit, total_work=log.total_work)
        steps = log.record(self.job.name, self.context.spec.rank, _SHOWN)
        return self._record(worker, steps, Status(JobState.RUNNING), outcome)

    @property
    def _is_tail(self) -> bool:
        return self.neighbour is not None

    @property
    def _say_s(self) -> float:
        """The patience with which the job's end is told: at the training's end ``Claims.stop`` tells it."""
        return 0.0 if self.context.over else _SAY_S

    def _last_progress(self) -> Progress:
        """Return the progress of a job whose run raised an unexpected exception."""
        try:
            return self.progress()
        except Exception:
            logger.exception("job %s: nobody knows how far it is", self.job.name)
            return self.job.progress

    def _run(self) -> None:
        """Start the worker, watch it to its end, and report the end to the store, the records and the log.

        Raises:
            NotStarted: the job did not begin.
        """
        context, job, claim = self.context, self.job, self.claim
        if refused := refusal(job.work, context.spec.allow):
            raise NotStarted(Status(JobState.FAILED, Cause.NOT_ALLOWED, refused))
        with ExitStack() as always:
            limits = context.limits(job)
            directory = job_folder(Path(context.spec.run_dir), job, context.spec.user)
            if directory is None:
                raise OSError("it has no folder; the agent's log says why")
            if not context.claims.ask(lambda store: store.place(claim, str(directory)), _SAY_S):
                return  # the claim is lost, or the store cannot be reached and the lease runs out
            logger.info("job %s: starting as the %s job", job.name, "tail" if self._is_tail else "resident")
            always.enter_context(occupied(directory))
            self.held.beat_s = self._told_s = time.monotonic()
            self.started_ns, self.started_s = time.monotonic_ns(), time.time()
            always.enter_context(context.ledger.running(self.so_far))
            with ExitStack() as at_end:  # whatever is raised, no process of the worker is left
                self._worker = worker = self._start(limits, directory, at_end)
                end = self._watch(worker)
            status, progress = self.judge.verdict(job, end), self.progress()
            if status.cause is Cause.DOES_NOT_FIT:
                status = replace(status, device=context.name)
            if status.failed:
                progress = replace(progress, failures=progress.failures + 1)
            if end.standing is not Standing.LOST:
                heard = context.claims.finish(claim, status, progress, end.outcome.result, self._say_s)
                status = replace(status, unheard=not heard)
            if end.unfit:
                context.ranking.misfits.tried(job.id, self._is_tail)
            logger.info("job %s: %s %s", job.name, status.state, status.text)
            steps = worker.log.record(job.name, context.spec.rank)
            context.ledger.keep(*self._record(worker, steps, status, end.outcome, end.violations))

    def _start(self, limits: Limits, directory: Path, at_end: ExitStack) -> JobWorker:
        """Start the worker, and let the job begin once it is in its sandbox; ``at_end`` gets what is to be undone."""
        context, job = self.context, self.job
        context.claims.renew(self.held)  # on a busy machine a start may take longer than a lease
        at_end.callback(context.claims.stop_renewing, self.claim)
        for attendant in context.attendants:
            at_end.enter_context(attendant.shown(folder_name(job)))
        process = at_end.enter_context(self.pool.worker(job))
        limiter = context.device.limiter(limits, process.name)
        at_end.callback(limiter.close)
        output = BoundedOutput(output_file(directory), context.spec.max_output_bytes)
        at_end.callback(output.close)
        if not self._is_tail:
            at_end.callback(context.baton.drop)
        at_end.callback(self._end_process, process)
        log_fd = create_log()
        try:
            log = StepLog(log_fd)
            requests = StopRequests(context, self.held, log, self.started_ns)
            spec = write_spec(context, job, limits, directory, limiter.environment, self.neighbour)
            process.give(spec, log_fd)
        finally:
            os.close(log_fd)
        report = self._await_sandbox(process, requests)
        limiter.adopt(report.init, process.pid)
        at_end.callback(limiter.kill)
        process.begin()
        self.pool.stand_by()
        for lacking in report.lacking:
            logger.info("job %s: %s", job.name, lacking)
        command = job.work.command is not None
        return JobWorker(process.process, report.pid, directory, log, output, limiter, requests, command=command)

    def _await_sandbox(self, process: WorkerProcess, requests: StopRequests) -> SandboxReport:
        end_s = time.monotonic() + _SANDBOX_S
        while time.monotonic() < end_s:
            ending = requests.look()
            if ending is not None and ending.how is How.CUT:
                raise OSError(why(ending.cause, ending.detail))
            if ending is not None and ending.cause is self.context.over:  # it has nothing to save yet
                raise NotStarted(Status(JobState.QUEUED, ending.cause, ending.detail))
            with contextlib.suppress(TimeoutError):
                found = process.sandbox_report(_LOOK_S)
                if found is None:
                    raise OSError("its worker ended before the job could begin")
                if found.error:
                    raise OSError(f"it cannot be kept in: {found.error}")
                return found
        raise OSError(f"its worker was not ready within {_SANDBOX_S:g} s")

    def _end_process(self, process: WorkerProcess) -> None:
        """End a worker's first process if it has not ended, and log its output that nobody has read."""
        if said := process.end():
            logger.warning("job %s: its worker said: %s", self.job.name, said[-_MOST_SAID:])

    def _watch(self, worker: JobWorker) -> End:
        context, spec = self.context, self.context.spec
        enforcer = Enforcer(
            worker.pid,
            context.gate,
            worker.log,
            spec.grace_ns,
            spec.max_overruns,
            Overtime(worker.limiter.busy_s, context.gate, max(1, len(spec.cpus))),
            off=lambda: context.gate.braked or not context.control.running,
            waits=not worker.command,
        )
        self._energy = energy = EnergyShare(context.device.energy_j, lambda: worker.log.device_ns)
        promised_bytes, ask = self.job.work.memory_bytes or 0, worker.ask_to_shrink
        with MemoryShare(context.memory, worker.limiter, promised_bytes, ask, worker.shrinking) as memory:
            try:
                worker.watch(enforcer, memory, lambda: self._forecast(worker.directory))
            finally:
                energy.look()
                enforcer.close()
        self._keep_profile(worker.directory)
        outcome, saved_s = worker.outcome(), worker.log.checkpoint_s or 0.0
        return End(
            outcome,
            ending=worker.ending,
            standing=self.held.standing,
            saved=saved_s > self.started_s,
            kept=bool(saved_s or self.job.progress.checkpoint_s),
            request=memory.request,
            over=self.context.over,
            unfit=outcome.cause in (Cause.DOES_NOT_FIT, Cause.CROWDED) or memory.ending is not None,
            violations=enforcer.violations,
        )

    def _forecast(self, directory: Path) -> None:
        """Update the expected end and the energy, and keep the job's profile; called a few times a second."""
        if time.monotonic() - self._told_s > _TELL_S:
            self._told_s = time.monotonic()
            self.done_at_s = self.context.ranking.done_at_s(self.progress(), directory)
        if self._energy is not None:
            self._energy.look()
        self._keep_profile(directory)

    def _keep_profile(self, directory: Path) -> None:
        job, path, ranking = self.job, directory / PROFILE, self.context.ranking
        if self._profile_kept or not os.path.lexists(path):
            return
        try:
            measured = MeasuredJob.from_dict(untrusted.read_json(path))
        except (OSError, ValueError) as error:
            logger.warning("job %s: its profile cannot be read: %s", job.name, error)
            self._profile_kept = True
            return
        ranking.remember(job, measured)

        def keep(store: JobStore) -> bool:
            store.keep_profile(ranking.key(job), measured.to_dict())
            return True

        self._profile_kept = bool(self.context.claims.ask(keep))

    def _record(
        self, worker: JobWorker, steps: WorkerRecord, status: Status, outcome: Outcome, violations: int = 0
    ) -> Record:
        """Return the record; the job's counts are those of ``steps``, since the log itself has changed since then."""
        job, log, now_ns = self.job, worker.log, time.monotonic_ns()
        record = JobRecord(
            name=job.name,
            what=job.work.what,
            status=status,
            work_done=steps.work_done + steps.alone_work,
            unit=outcome.unit,
            rank=steps.rank,
            steps=steps.steps_done + log.alone_steps,
            harvested_s=steps.harvested_ns / 1e9,
            total_work=outcome.total_work,
            result=outcome.result,
            directory=str(worker.directory),
            ended_s=time.time(),
            attempt=job.attempt,
            started_ns=self.started_ns,
            ready_ns=log.ready_ns if self.started_ns <= log.ready_ns <= now_ns else 0,
            ended_ns=worker.ended_ns,
            peak_bytes=worker.limiter.peak_bytes,
            violations=violations,
            side_throughput=job.work.side_throughput,
        )
        return record, steps
