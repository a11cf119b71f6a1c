"""One of an agent's two seats: takes a job, has it run in a worker, and tells the store how it ended."""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.fill.control import RunState
from megatron.fill.device.port import Limits
from megatron.fill.device.pressure import NoRoom
from megatron.fill.errors import FillError
from megatron.fill.planner.cycles import cycle_to_dict
from megatron.fill.runtime import safefile
from megatron.fill.runtime.choice import Resident
from megatron.fill.runtime.enforcer import Enforcer
from megatron.fill.runtime.folder import job_folder
from megatron.fill.runtime.guest import refusal
from megatron.fill.runtime.jobrun import JobRun
from megatron.fill.runtime.keeper import Held, progress_of
from megatron.fill.runtime.profiler import PROFILE
from megatron.fill.runtime.room import Room, worker_cap
from megatron.fill.runtime.spec import Outcome, WorkerSpec
from megatron.fill.runtime.steplog import StepLog, create_log
from megatron.fill.store.port import Claim, Job, JobStore, Standing
from megatron.fill.types import JobRecord, JobState

if TYPE_CHECKING:
    from megatron.fill.runtime.agent import Agent

logger = logging.getLogger("pipefill.agent")

_CRASHES = 3  # in a row and without a checkpoint in between: then an agent gives a job up
_LOST = "the store was out of reach for longer than its lease: another agent may have it"
_OVER = "the main job ended first"
_KILLED = "ended by pipefill kill"
_TELL_S = 5.0  # how often the end of the job is estimated anew
_SAY_S = 8.0  # how long the end of a job is told to a store that does not answer


class Seat:
    """Serves one job after the other.

    Attributes:
        job_name: the job that sits here; empty for none.
        resident: that job and its folder, while its worker runs.
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
            return False
        self.job_name, self.busy_until_s = claim.job.name, math.inf
        agent.keeper.look_again()
        try:
            self._admit(claim)
        finally:
            self.job_name, self.busy_until_s, self.resident, self.room = "", None, None, None
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
        agent.keeper.finish(held, state, reason, {}, _SAY_S)

    def _run(self, claim: Claim, limits: Limits) -> None:
        agent, job, spec = self.agent, claim.job, self.agent.spec
        directory = job_folder(agent.run_dir, job, agent.guest)
        if directory is None:
            raise OSError("it has no folder; the agent's log says why")
        if not agent.keeper.ask(lambda store: store.place(claim, str(directory)), _SAY_S):
            return  # lost already, or nobody hears us: the lease runs out
        logger.info("job %s: starting as the %s", job.name, self)
        log_fd = create_log()
        log = StepLog(log_fd)
        limiter = agent.device.limiter(limits, f"{os.getpid()}-{job.id}-{job.attempt}")
        worker_spec = self._worker_spec(claim, directory, log_fd, limits)
        started_ns, began_at_s = time.monotonic_ns(), time.time()
        extra = (job.spec.get("env") or {}) | limiter.environment
        worker = agent.start_worker(worker_spec, log_fd, extra, idle=job.spec["command"] is None)
        limiter.adopt(worker.pid)
        os.close(log_fd)
        held = Held(claim, lambda: progress_of(job, log, started_ns / 1e9))
        agent.keeper.hold(held)
        self.resident = Resident(job, directory)
        self.room = room = Room(
            agent.device,
            limiter,
            job.spec["memory_bytes"] or 0,
            spec.margin_bytes,
            lambda wanted: self._shrink(log, wanted, worker.pid),
        )
        keep_profile = self._profile_keeper(held, directory)
        run = JobRun(
            worker,
            log,
            directory,
            Enforcer(worker.pid, agent.gate, log, spec.grace_ns, spec.max_overruns),
            limiter,
            spec.max_output_bytes,
            stop=lambda: self._why_stop(held) or room.why_stop,
            end=lambda: self._why_end(held) or room.why_end,
            ticks=(keep_profile, room.look),
        )
        try:
            run.watch()
        finally:
            agent.forget_worker(worker.pid)
            if not self.tail:
                agent.baton.drop()
            agent.keeper.let_go(held)
        keep_profile()
        outcome, crashed = run.outcome(log.unit)
        saved = (log.checkpoint_s or 0.0) > began_at_s
        state, reason = self._judge(held, run, outcome, crashed, saved)
        if held.standing is not Standing.LOST and not agent.keeper.finish(held, state, reason, outcome.result, _SAY_S):
            reason += " (the store did not hear of it)"
        if outcome.unfit or room.reason:
            agent.choice.unfit(job.id, self.tail)
        logger.info("job %s: %s %s", job.name, state, reason)
        agent.keep_record(
            JobRecord(
                name=job.name,
                what=job.spec["task"] or shlex.join(job.spec["command"]),
                state=state,
                reason=reason,
                work_done=log.work_done,
                unit=outcome.unit,
                rank=spec.rank,
                steps=log.step_count,
                harvested_s=log.harvested_ns / 1e9,
                total_work=outcome.total_work,
                result=outcome.result,
                directory=str(directory),
                ended_s=time.time(),
                started_ns=started_ns,
                ready_ns=log.ready_ns,
                ended_ns=run.ended_ns,
            ),
            log.record(job.name, spec.rank),
        )

    def _why_stop(self, held: Held) -> str:
        if self.agent.over:
            return _OVER
        if held.standing is Standing.CANCELLED:
            return "it was cancelled"
        return ""

    def _why_end(self, held: Held) -> str:
        if held.standing is Standing.LOST:
            return _LOST
        return _KILLED if self.agent.control.state is RunState.KILLED else ""

    def _shrink(self, log: StepLog, wanted_bytes: int, pid: int) -> None:
        log.wanted_bytes = wanted_bytes
        os.kill(pid, signal.SIGUSR1)

    def _judge(self, held: Held, run: JobRun, outcome: Outcome, crashed: bool, saved: bool) -> tuple[JobState, str]:
        """What the store should know: a job that was cut off goes back, one that only ever dies does not.

        Args:
            crashed: the worker died without a word.
            saved: it had written a checkpoint before, so something was gained.
        """
        if held.standing is Standing.CANCELLED and outcome.state is not JobState.SUCCEEDED:
            return JobState.CANCELLED, "cancelled while it ran"
        if run.cut or (crashed and run.stopped):
            again = "it goes on from its last checkpoint" if saved else "it begins again"
            return JobState.QUEUED, f"{run.cut or run.stopped}; {again}"
        if not crashed:
            if outcome.state is JobState.QUEUED and not outcome.unfit:
                return outcome.state, f"{run.stopped or _OVER}; {outcome.reason}"
            return outcome.state, outcome.reason
        crashes = self.agent.crashes
        number = held.claim.job.id
        crashes[number] = 1 if saved else crashes.get(number, 0) + 1
        if crashes[number] < _CRASHES:
            return JobState.QUEUED, f"{outcome.reason}; it is tried again"
        return JobState.FAILED, f"{outcome.reason}, {_CRASHES} times in a row without having saved anything"

    def _limits(self, job: Job) -> Limits | NoRoom:
        agent, spec = self.agent, self.agent.spec
        others = sum(seat.room.claim_bytes for seat in agent.seats if seat.room is not None)
        memory_bytes = worker_cap(job.spec["memory_bytes"], agent.device, agent.board.read(), spec.margin_bytes, others)
        if isinstance(memory_bytes, NoRoom):
            return memory_bytes
        return Limits(memory_bytes, spec.processes, spec.files, spec.sm_percentage)

    def _worker_spec(self, claim: Claim, directory: Path, log_fd: int, limits: Limits) -> Path:
        agent, job = self.agent, claim.job
        spec = WorkerSpec(
            name=job.name,
            directory=str(directory),
            gate_fd=agent.spec.gate_fd,
            log_fd=log_fd,
            board_fd=agent.spec.board_fd,
            control_fd=agent.control_reader_fd,
            baton_fd=agent.baton_fd,
            parent=os.getpid(),
            tail=self.tail,
            cycle=self._cycle(),
            profiles=agent.choice.profile_of(job),
            checkpoint_s=agent.spec.checkpoint_s,
            device=agent.device.worker_name,
            cpus=agent.spec.cpus,
            task=job.spec["task"],
            command=job.spec["command"],
            args=job.spec["args"],
            limits=limits,
            sharing=agent.spec.sharing,
            # A job could bring a module of an allowed name along: what is allowed has to be installed.
            search=[] if agent.spec.allow else job.spec["search"],
        )
        path = directory / "spec.json"
        safefile.write_text(path, spec.to_json(), mode=0o600)
        if agent.guest is not None:
            os.chown(path, agent.guest.uid, agent.guest.gid, follow_symlinks=False)
        return path

    def _cycle(self) -> dict[str, Any] | None:
        resident = self.agent.seats[0].resident
        left = self.agent.choice.leftover(resident) if self.tail and resident is not None else None
        return None if left is None else cycle_to_dict(left)

    def _profile_keeper(self, held: Held, directory: Path) -> Callable[[], None]:
        """Called every tick: keep the profile in the store once the worker has measured it; tell when it will end."""
        job = held.claim.job
        kept, told_s = False, time.monotonic()

        def look() -> None:
            nonlocal kept, told_s
            if time.monotonic() - told_s > _TELL_S:
                told_s = time.monotonic()
                self.busy_until_s = self.agent.choice.done_at_s(held.progress(), directory)
            if kept or not (directory / PROFILE).exists():
                return
            try:
                content: dict[str, Any] = json.loads(safefile.read_text(directory / PROFILE))
            except (OSError, ValueError) as error:
                logger.warning("job %s: its profile cannot be read: %s", job.name, error)
                kept = True
                return
            self.agent.choice.remember(job, content)
            key = self.agent.choice.key(job)

            def keep(store: JobStore) -> bool:
                store.keep_profile(key, content)
                return True

            kept = bool(self.agent.keeper.ask(keep))

        return look
