"""One of an agent's two seats: takes one job after the other, and runs those that may run here."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from megatron.fill.control import RunState
from megatron.fill.device.port import Limits
from megatron.fill.device.pressure import NoRoom
from megatron.fill.errors import FillError
from megatron.fill.runtime.attempt import SAY_S, Attempt
from megatron.fill.runtime.choice import Resident
from megatron.fill.runtime.folder import job_folder, occupied
from megatron.fill.runtime.guest import refusal
from megatron.fill.runtime.keeper import Held
from megatron.fill.runtime.room import Room
from megatron.fill.store.port import Claim, Job
from megatron.fill.types import JobState

if TYPE_CHECKING:
    from megatron.fill.runtime.agent import Agent

logger = logging.getLogger("pipefill.agent")


class Seat:
    """Serves one job after the other.

    Attributes:
        job_name: the job that sits here; empty for none.
        resident: that job and its folder, while its worker runs.
        attempt: at that job.
        room: its worker's part in leaving the main job room.
        busy_until_s: when it is expected to be done, in seconds since the epoch; None without a job, infinity if
            nobody knows.
    """

    def __init__(self, agent: Agent, tail: bool) -> None:
        self.agent = agent
        self.tail = tail
        self.job_name = ""
        self.busy_until_s: float | None = None
        self.resident: Resident | None = None
        self.attempt: Attempt | None = None
        self.room: Room | None = None

    def __str__(self) -> str:
        return "tail job" if self.tail else "resident job"

    def serve(self) -> bool:
        """Run the next job, if there is one for this seat; whether there was."""
        agent = self.agent
        if agent.control.state is not RunState.RUNNING:
            return False
        if self.tail and not agent.baton.held:  # the resident job does not serve bubbles yet
            return False
        beside = agent.seats[0].resident if self.tail else None
        if self.tail and beside is None:
            return False
        claim = agent.keeper.claim(lambda store: agent.choice.wanted(store, beside), agent.name)
        if claim is None:
            if not self.tail and not agent.seats[1].job_name:  # no job at all: what is another rank's tail worth here?
                agent.keeper.ask(agent.mover.look)
            return False
        self.job_name, self.busy_until_s = claim.job.name, math.inf
        agent.keeper.look_again()
        try:
            self._admit(claim)
        finally:
            self.job_name, self.busy_until_s = "", None
            self.resident = self.attempt = self.room = None
            agent.keeper.look_again()
        return True

    def _admit(self, claim: Claim) -> None:
        """Run the job, unless it may not run here or cannot be started."""
        job, agent = claim.job, self.agent
        held = Held(claim, lambda: job.progress)
        reason, state = "", JobState.FAILED
        try:
            reason = refusal(job.spec, agent.spec.allow)
            if not reason:
                limits = self._limits(job)
                if isinstance(limits, Limits):
                    self._run(claim, limits)
                    return
                state, reason = JobState.QUEUED, f"too little memory: {limits.reason}"
                agent.choice.unfit(job.id, self.tail)
        except OSError as error:  # a full disk, say: another rank may do better, or this one later
            state, reason = JobState.QUEUED, f"it could not be started: {error}"
            agent.choice.unfit(job.id, self.tail)
        except (FillError, LookupError, TypeError, ValueError) as error:
            reason = f"it cannot be started: {type(error).__name__}: {error}"
        logger.warning("job %s: %s %s", job.name, state, reason)
        agent.keeper.finish(held, state, reason, {}, SAY_S)

    def _run(self, claim: Claim, limits: Limits) -> None:
        agent, job = self.agent, claim.job
        directory = job_folder(agent.run_dir, job, agent.guest)
        if directory is None:
            raise OSError("it has no folder; the agent's log says why")
        if not agent.keeper.ask(lambda store: store.place(claim, str(directory)), SAY_S):
            return  # lost already, or nobody hears us: the lease runs out
        logger.info("job %s: starting as the %s", job.name, self)
        with occupied(directory):
            self.attempt = Attempt(self, claim, limits, directory)
            self.attempt.run()

    def may_run(self, job: Job) -> bool:
        """Whether the job may run here, and there is memory for it now."""
        return not refusal(job.spec, self.agent.spec.allow) and isinstance(self._limits(job), Limits)

    def _limits(self, job: Job) -> Limits | NoRoom:
        agent, spec = self.agent, self.agent.spec
        memory_bytes = agent.cap(job.spec["memory_bytes"], agent.board.read())
        if isinstance(memory_bytes, NoRoom):
            return memory_bytes
        return Limits(memory_bytes, spec.processes, spec.files, spec.sm_percentage)
