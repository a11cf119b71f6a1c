"""A seat of the agent (there are two): takes the next job, runs it (``JobRun``), and takes the next."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from megatron.fill.agent.admission import refusal
from megatron.fill.agent.context import AgentContext
from megatron.fill.agent.ranking import Resident
from megatron.fill.agent.run import JobRun
from megatron.fill.agent.workers import WorkerPool
from megatron.fill.device.port import Limits
from megatron.fill.pages.control import RunState
from megatron.fill.store.port import Job, JobStore

logger = logging.getLogger("pipefill.agent")

_LOOK_AGAIN_S = 5.0  # even if the queue has not changed: leases expire, and devices become busy or free
_REST_S = 0.2  # between two looks whether a rest is over


class Seat:
    """Serves one job after the other, in a thread of its own; any thread may read the properties.

    Args:
        beside: returns the resident job, for the tail seat; None for the resident seat.
        idle: called when there is no job for this seat.

    Attributes:
        job_name: name of the present job; empty for none.
    """

    def __init__(
        self,
        context: AgentContext,
        pool: WorkerPool,
        beside: Callable[[], Resident | None] | None = None,
        idle: Callable[[], object] = lambda: None,
    ) -> None:
        self.context = context
        self.pool = pool
        self.tail = beside is not None
        self.job_name = ""
        self._beside = beside or (lambda: None)
        self._idle = idle
        self._run: JobRun | None = None
        self._has_stepped = False  # a job that has ended has done a step
        self._seen: object = None  # state of store, cycle and resident job at the latest look
        self._looked_s = 0.0

    def __str__(self) -> str:
        return "tail job" if self.tail else "resident job"

    @property
    def resident(self) -> Resident | None:
        """The present job and its folder from its first step until its worker ends, otherwise None.

        What it leaves to a tail job is unknown before, and a tail job that is set up at the same time delays it.  Jobs
        that are claimed later also go to ranks that have none yet.
        """
        run = self._run
        return run.resident if run is not None and run.stepped else None

    @property
    def stepped(self) -> bool | None:
        """True once any job of this seat has done a step; until then False with a job here, None without."""
        run = self._run
        if self._has_stepped or (run is not None and run.stepped):
            return True
        return False if self.job_name else None

    @property
    def busy_until_s(self) -> float | None:
        """The job's expected end in seconds since the epoch; infinity if unknown, None without a job."""
        run = self._run
        if not self.job_name:
            return None
        return math.inf if run is None else run.done_at_s

    def serve(self) -> bool:
        """Run the next job, and return True; False if there is none for this seat."""
        context, beside = self.context, self._beside()
        if context.control.state is not RunState.RUNNING:
            return False
        if self.tail and (beside is None or not context.baton.held):  # the resident job does not serve bubbles yet
            return False
        if context.device.name != "cpu" and context.board.read() is None:
            return False  # before the first iterations, the memory that the training leaves at its peak is unknown
        quota = context.spec.quota
        most = None if quota is None else quota.jobs
        claim = context.claims.claim(lambda store: self._wanted(store, beside), context.name, most)
        if claim is None:
            self._idle()
            return False
        self.job_name = claim.job.name
        context.claims.look_again()
        try:
            self._run = JobRun(context, self.pool, claim, beside)
            self._run.run()
        finally:
            self._has_stepped = bool(self.stepped)
            self.job_name, self._run = "", None
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
        return not refusal(job.work, self.context.spec.allow) and isinstance(self.context.limits(job), Limits)

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
