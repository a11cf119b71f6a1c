"""A seat of the agent (there are two): takes one job after the other, and runs those that may run here."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from megatron.fill.agent.admission import refusal
from megatron.fill.agent.attempt import Attempt
from megatron.fill.agent.context import AgentContext
from megatron.fill.agent.ending import Judge, NotStarted, starting
from megatron.fill.agent.folder import job_folder, occupied
from megatron.fill.agent.ledger import AttemptLedger
from megatron.fill.agent.ranking import Resident
from megatron.fill.agent.workers import WorkerPool
from megatron.fill.device.port import Limits
from megatron.fill.device.pressure import NoRoom
from megatron.fill.pages.control import RunState
from megatron.fill.status import Cause, JobState, Status, Then
from megatron.fill.store.port import Claim, Job, JobStore, Progress, Standing

logger = logging.getLogger("pipefill.agent")

_LOOK_AGAIN_S = 5.0  # even if the queue has not changed: leases expire, and devices become busy or free
_REST_S = 0.2  # between two looks whether a rest is over
_SAY_S = 8.0  # time for which a store that does not answer is tried


class Seat:
    """Serves one job after the other, in a thread of its own; any thread may read the properties.

    Args:
        judge: decides what becomes of a job; shared by the agent's seats.
        beside: returns the resident job, for the tail seat; None for the resident seat.
        idle: called when there is no job for this seat.

    Attributes:
        job_name: name of the present job; empty for none.
    """

    def __init__(
        self,
        context: AgentContext,
        pool: WorkerPool,
        ledger: AttemptLedger,
        judge: Judge,
        beside: Callable[[], Resident | None] | None = None,
        idle: Callable[[], object] = lambda: None,
    ) -> None:
        self.context = context
        self.pool = pool
        self.ledger = ledger
        self.judge = judge
        self.tail = beside is not None
        self.job_name = ""
        self._beside = beside or (lambda: None)
        self._idle = idle
        self._attempt: Attempt | None = None
        self._has_stepped = False  # a job whose attempt has ended has done a step
        self._seen: object = None  # state of store, cycle and resident job at the latest look
        self._looked_s = 0.0

    def __str__(self) -> str:
        return "tail job" if self.tail else "resident job"

    @property
    def resident(self) -> Resident | None:
        """The present job and its folder while its worker runs, otherwise None."""
        attempt = self._attempt
        return None if attempt is None else attempt.resident

    @property
    def stepped(self) -> bool | None:
        """True once any job of this seat has done a step; until then False with a job here, None without."""
        attempt = self._attempt
        if self._has_stepped or (attempt is not None and attempt.stepped):
            return True
        return False if self.job_name else None

    @property
    def busy_until_s(self) -> float | None:
        """The job's expected end in seconds since the epoch; infinity if unknown, None without a job."""
        attempt = self._attempt
        if not self.job_name:
            return None
        return math.inf if attempt is None else attempt.forecast.done_at_s

    def serve(self) -> bool:
        """Run the next job, and return True; False if there is none for this seat."""
        context, beside = self.context, self._beside()
        if context.control.state is not RunState.RUNNING:
            return False
        if self.tail and (beside is None or not context.baton.held):  # the resident job does not serve bubbles yet
            return False
        if context.device.name != "cpu" and context.board.read() is None:
            return False  # before the first iterations, the memory that the training leaves at its peak is unknown
        claim = context.claims.claim(lambda store: self._wanted(store, beside), context.name)
        if claim is None:
            self._idle()
            return False
        self.job_name = claim.job.name
        context.claims.look_again()
        try:
            self._see_to(claim, beside)
        finally:
            self._has_stepped = bool(self.stepped)
            self.job_name, self._attempt = "", None
            context.claims.look_again()
        return True

    def rest(self, seconds: float) -> None:
        """Wait for ``seconds``, at most until the training is over or the resident job next to this seat changes."""
        end_s, beside = time.monotonic() + seconds, self._neighbour
        while not self.context.over and self._neighbour == beside and time.monotonic() < end_s:
            time.sleep(_REST_S)

    @property
    def _neighbour(self) -> tuple[Resident | None, bool]:
        """The resident job next to this seat, and True if it serves bubbles."""
        beside = self._beside()
        return beside, beside is not None and self.context.baton.held

    def may_run(self, job: Job) -> bool:
        """True if the job may run here and there is memory for it now."""
        return not refusal(job.work, self.context.spec.allow) and isinstance(self._limits(job), Limits)

    def _wanted(self, store: JobStore, beside: Resident | None) -> Sequence[int]:
        """Return the ids of the jobs to claim, best first.

        If there were none at the latest look, the store is asked again only after a change or ``_LOOK_AGAIN_S``.
        """
        seen, now_s = (store.stamp(), self.context.board.version, beside), time.monotonic()
        if seen == self._seen and now_s - self._looked_s < _LOOK_AGAIN_S:
            return []
        store.recover()
        wanted = self.context.ranking.wanted(store, beside)
        self._seen, self._looked_s = None if wanted else seen, now_s
        return wanted

    def _see_to(self, claim: Claim, beside: Resident | None) -> None:
        """Run the job if it may run here; an exception does not count as the job's failure."""
        context, job = self.context, claim.job
        try:
            refused = refusal(job.work, context.spec.allow)
            if not refused:
                self._run(claim, beside)
                return
            status = Status(JobState.FAILED, Cause.NOT_ALLOWED, refused)
        except NotStarted as error:
            status = error.status
        except Exception as error:
            logger.exception("job %s: its agent failed", job.name)
            raised = f"{type(error).__name__}: {error}"
            status = Status(JobState.QUEUED, Cause.AGENT_FAILED, raised, Then.TRIED_AGAIN)
        if status.state is JobState.QUEUED:
            context.ranking.misfits.tried(job.id, self.tail)
        logger.warning("job %s: %s %s", job.name, status.state, status.text)
        context.claims.finish(claim, status, self._progress(job), {}, _SAY_S)

    def _run(self, claim: Claim, beside: Resident | None) -> None:
        """Run one attempt of the job, and report its end to the store, the report and the log.

        Raises:
            NotStarted: the job did not begin.
        """
        context, job = self.context, claim.job
        with ExitStack() as always:
            with starting():
                limits = self._limits(job)
                if isinstance(limits, NoRoom):
                    raise NotStarted(Cause.NO_MEMORY, limits.reason)
                directory = job_folder(context.run_dir, job, context.spec.user)
                if directory is None:
                    raise OSError("it has no folder; the agent's log says why")
                if not context.claims.ask(lambda store: store.place(claim, str(directory)), _SAY_S):
                    return  # the claim is lost, or the store cannot be reached and the lease runs out
                logger.info("job %s: starting as the %s", job.name, self)
                always.enter_context(occupied(directory))
            self._attempt = attempt = Attempt(context, self.pool, claim, limits, directory, beside)
            always.enter_context(self.ledger.running(attempt.so_far))
            end = attempt.run()
            status, progress = self.judge.verdict(job, end), attempt.progress()
            if status.cause is Cause.DOES_NOT_FIT:
                status = replace(status, device=context.name)
            if status.failed:
                progress = replace(progress, failures=progress.failures + 1)
            if end.standing is not Standing.LOST:
                heard = context.claims.finish(claim, status, progress, end.outcome.result, _SAY_S)
                status = replace(status, unheard=not heard)
            if end.unfit:
                context.ranking.misfits.tried(job.id, self.tail)
            logger.info("job %s: %s %s", job.name, status.state, status.text)
            self.ledger.keep(*attempt.record(status, end))

    def _progress(self, job: Job) -> Progress:
        """Return the progress of a job whose attempt raised an unexpected exception."""
        try:
            return job.progress if self._attempt is None else self._attempt.progress()
        except Exception:
            logger.exception("job %s: nobody knows how far it is", job.name)
            return job.progress

    def _limits(self, job: Job) -> Limits | NoRoom:
        context, spec = self.context, self.context.spec
        memory_bytes = context.memory.cap(job.work.memory_bytes, context.board.read())
        if isinstance(memory_bytes, NoRoom):
            return memory_bytes
        return Limits(memory_bytes, spec.processes, spec.files, spec.sm_percentage)
