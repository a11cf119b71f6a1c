"""One job in one worker, from its start to the word to the store."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.fill import hearsay
from megatron.fill.control import RunState
from megatron.fill.device.port import Limits
from megatron.fill.planner.cycles import cycle_to_dict
from megatron.fill.profiles import MeasuredJob
from megatron.fill.runtime import safefile
from megatron.fill.runtime.choice import Resident
from megatron.fill.runtime.confined import Confined
from megatron.fill.runtime.enforcer import Enforcer
from megatron.fill.runtime.guest import environment, told
from megatron.fill.runtime.jobrun import JobRun
from megatron.fill.runtime.keeper import Held, progress_of
from megatron.fill.runtime.overtime import Overtime
from megatron.fill.runtime.profiler import PROFILE
from megatron.fill.runtime.room import Room
from megatron.fill.runtime.spec import Outcome, WorkerSpec
from megatron.fill.runtime.steplog import Saving, StepLog, create_log
from megatron.fill.runtime.verdict import MOVES, OVER, TIMEOUT, End, Verdict
from megatron.fill.sandbox.cage import Bind, Cage
from megatron.fill.store.location import database_files
from megatron.fill.store.port import Claim, JobStore, Progress, Standing
from megatron.fill.types import JobRecord, JobState, WorkerRecord

if TYPE_CHECKING:
    from megatron.fill.runtime.seat import Seat

logger = logging.getLogger("pipefill.agent")

SAY_S = 8.0  # how long the end of a job is told to a store that does not answer
_KILLED = "ended by pipefill kill"
_LOST = "the store was out of reach for longer than its lease: another agent may have it"
_TELL_S = 5.0  # how often the end of the job is estimated anew
_CONFINED_S, _LOOK_S = 60.0, 0.2  # how long a worker may take until its job can begin, on a machine that is busy
_MOST_SAID = 2000
_MEMORY_FILES_BYTES = 1 << 30  # of a job without a cap
_SHOWN = 2000  # bubbles and steps, the most recent ones, in the record of a job that runs


class Attempt:
    """One claim of a job, served in a seat.

    Args:
        directory: the job's folder, ready.

    Raises:
        OSError: no worker can be started; nothing of it is left.
    """

    def __init__(self, seat: Seat, claim: Claim, limits: Limits, directory: Path) -> None:
        self.seat = seat
        self.agent = seat.agent
        self.claim = claim
        self.job = claim.job
        self.timeout_s = claim.job.spec.get("timeout_s") or math.inf
        self.limits = limits
        self.directory = directory
        self.started_ns, self.started_s = time.monotonic_ns(), time.time()
        self.failed = False
        self.held = Held(claim, self._progress)
        self.holder = self.agent.start_worker(self.job)
        try:
            self.limiter = self.agent.device.limiter(limits, self.holder.name)
            self.log_fd = create_log()
            self.log = StepLog(self.log_fd)
        except BaseException:
            self._abandon()
            raise

    def run(self) -> None:
        """Run the job and tell the store how it ended.

        Raises:
            OSError: it could not be started; nothing of it is left.
        """
        agent = self.agent
        agent.keeper.hold(self.held)  # on a busy machine a start may take longer than a lease
        try:
            try:
                self._start()
            except BaseException:
                self.limiter.close()
                raise
            finally:
                os.close(self.log_fd)
            try:
                run, room = self._watch()
            finally:
                agent.forget_worker(self.holder.pid)
                if not self.seat.tail:
                    agent.baton.drop()
        finally:
            agent.keeper.let_go(self.held)
        outcome, crashed = run.outcome(self.log.unit)
        verdict = self._verdict(run, room, outcome, crashed)
        self.failed, state, reason = verdict.failed, verdict.state, verdict.reason
        lost = self.held.standing is Standing.LOST
        if not lost and not agent.keeper.finish(self.held, state, reason, outcome.result, SAY_S):
            reason += " (the store did not hear of it)"
        if outcome.unfit or outcome.crowded or room.reason:
            agent.choice.unfit(self.job.id, self.seat.tail)
        logger.info("job %s: %s %s", self.job.name, state, reason)
        record = replace(
            self._record(state, reason),
            unit=outcome.unit,
            total_work=outcome.total_work,
            result=outcome.result,
            ended_ns=run.ended_ns,
            offences=run.enforcer.offences,
        )
        agent.keep_record(record, self.log.record(self.job.name, agent.spec.rank))

    def _progress(self) -> Progress:
        progress = progress_of(self.job, self.log, self.started_ns / 1e9)
        return replace(progress, failures=progress.failures + self.failed)

    def so_far(self) -> tuple[JobRecord, WorkerRecord]:
        """The record of a job that runs."""
        unit = self.log.unit or self.job.progress.unit
        record = replace(self._record(JobState.RUNNING, ""), unit=unit, total_work=self.log.total_work)
        return record, self.log.record(self.job.name, self.agent.spec.rank, _SHOWN)

    def _start(self) -> None:
        """Let the job begin once it is kept in.

        Raises:
            OSError: it could not be started, or not be kept in; nothing of it is left.
        """
        holder = self.holder
        try:
            holder.give(self._worker_spec(), self.log_fd)
            self.confined = confined = self._confined()
            self.limiter.adopt(confined.init, holder.pid)
            holder.let_go()
        except BaseException:
            self._abandon()
            raise
        self.agent.stand_by()
        for lacking in confined.lacking:
            logger.info("job %s: %s", self.job.name, lacking)

    def _confined(self) -> Confined:
        end_s = time.monotonic() + _CONFINED_S
        while time.monotonic() < end_s and not self._why_end():
            with contextlib.suppress(TimeoutError):
                found = self.holder.confined(_LOOK_S)
                if found is None:
                    raise OSError("its worker ended before the job could begin")
                if found.error:
                    raise OSError(f"it cannot be kept in: {found.error}")
                return found
        raise OSError(self._why_end() or f"its worker was not ready within {_CONFINED_S:g} s")

    def _abandon(self) -> None:
        """End a worker whose job has not begun: it takes all with it."""
        if said := self.holder.end():
            logger.warning("job %s: its worker said: %s", self.job.name, said[-_MOST_SAID:])
        self.agent.forget_worker(self.holder.pid)

    def _watch(self) -> tuple[JobRun, Room]:
        """Stay with the worker until it has ended."""
        seat, spec = self.seat, self.agent.spec
        seat.resident = Resident(self.job, self.directory)
        promised = self.job.spec["memory_bytes"] or 0
        seat.room = room = Room(
            self.agent.device,
            self.limiter,
            promised,
            spec.margin_bytes,
            self._ask_to_shrink,
        )
        agent = self.agent
        enforcer = Enforcer(
            self.confined.pid,
            agent.gate,
            self.log,
            spec.grace_ns,
            spec.max_overruns,
            Overtime(self.limiter.busy_s, agent.gate, max(1, len(spec.cpus))),
            off=lambda: agent.gate.braked or not agent.control.running,
        )
        keep_profile = self._profile_keeper()
        run = JobRun(
            self.holder.process,
            self.log,
            self.directory,
            enforcer,
            self.limiter,
            spec.max_output_bytes,
            self._ask_to_stop,
            stop=lambda: self._why_stop() or room.why_stop,
            end=lambda: self._why_end() or room.why_end,
            ticks=(keep_profile, room.look, enforcer.look_at_account),
        )
        run.watch()
        keep_profile()
        return run, room

    def _why_stop(self) -> str:
        if self.agent.over:
            return OVER
        if self.held.standing is Standing.CANCELLED:
            return "it was cancelled"
        if time.monotonic_ns() - self.started_ns > self.timeout_s * 1e9:
            return TIMEOUT
        return MOVES if self._may_move() else ""

    def _may_move(self) -> bool:
        """Whether another rank has asked for the job, and it has been saved since: a move must not cost any work."""
        log = self.log
        if self.held.standing is not Standing.MOVE:
            log.saving = Saving.NONE
        elif log.saving is Saving.NONE:
            log.saving = Saving.WANTED
        return log.saving is Saving.SAVED

    def _why_end(self) -> str:
        if self.held.standing is Standing.LOST:
            return _LOST
        return _KILLED if self.agent.control.state is RunState.KILLED else ""

    def _ask_to_stop(self) -> None:
        """A task saves itself; of a command its holder says how far it came."""
        if self.job.spec["command"] is None:
            self._signal(signal.SIGTERM)
        else:
            self.holder.process.terminate()

    def _ask_to_shrink(self, to_bytes: int) -> None:
        """Have the task give memory back at its next look around, which a signal brings about; a command cannot."""
        if self.job.spec["command"] is None:
            self.log.wanted_bytes = to_bytes
            self._signal(signal.SIGUSR1)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.confined.pid, number)

    def _verdict(self, run: JobRun, room: Room, outcome: Outcome, crashed: bool) -> Verdict:
        saved_s = self.log.checkpoint_s or 0.0
        end = End(
            outcome,
            crashed=crashed,
            standing=self.held.standing,
            stopped=run.stopped,
            late=run.late,
            cut=run.cut,
            saved=saved_s > self.started_s,
            kept=bool(saved_s or self.job.progress.checkpoint_s),
            request=room.request,
            over=self.agent.over,
        )
        return self.agent.judge.verdict(self.job, end)

    def _record(self, state: JobState, reason: str) -> JobRecord:
        job, log, now_ns = self.job, self.log, time.monotonic_ns()
        return JobRecord(
            name=job.name,
            what=job.spec["task"] or shlex.join(job.spec["command"]),
            state=state,
            reason=reason,
            work_done=log.work_done,
            unit="",
            rank=self.agent.spec.rank,
            steps=log.step_count,
            harvested_s=log.harvested_ns / 1e9,
            directory=str(self.directory),
            ended_s=time.time(),
            attempt=job.attempt,
            started_ns=self.started_ns,
            ready_ns=log.ready_ns if self.started_ns <= log.ready_ns <= now_ns else 0,
            peak_bytes=self.limiter.peak_bytes,
            side_throughput=job.spec.get("side_throughput"),
        )

    def _worker_spec(self) -> Path:
        agent, job = self.agent, self.job
        fixed = self.limiter.environment  # what the device needs is not the job's to change
        spec = WorkerSpec(
            name=job.name,
            directory=str(self.directory),
            gate_fd=agent.spec.gate_fd,
            board_fd=agent.spec.board_fd,
            control_fd=agent.control_reader_fd,
            baton_fd=agent.baton_fd,
            environment=environment(os.environ, fixed, agent.guest, self.directory),
            cage=self._cage(),
            tail=self.seat.tail,
            cycle=self._cycle(),
            profiles=agent.choice.profile_of(job),
            checkpoint_s=agent.spec.checkpoint_s,
            margin_bytes=agent.spec.margin_bytes + agent.device.overhead_bytes,
            device=agent.device.worker_name,
            cpus=agent.spec.cpus,
            emulate=agent.spec.emulate,
            task=job.spec["task"],
            command=job.spec["command"],
            args=job.spec["args"],
            limits=self.limits,
            sharing=agent.spec.sharing,
            # A job could bring a module of an allowed name along: what is allowed has to be installed.
            search=[] if agent.spec.allow else job.spec["search"],
            env={name: value for name, value in (job.spec.get("env") or {}).items() if name not in fixed}
            | told(job, agent.spec.run_dir, self.directory),
            array=job.spec.get("array"),
        )
        path = self.directory / "spec.json"
        safefile.write_text(path, spec.to_json(), mode=0o600)
        return path

    def _cage(self) -> Cage:
        spec, guest, device = self.agent.spec, self.agent.guest, self.agent.device
        mps = (Bind(spec.mps_pipe, writable=True),) if spec.mps_pipe is not None else ()
        return Cage(
            namespaces=spec.namespaces,
            directory=str(self.directory),
            binds=(*(Bind(place) for place in self.job.spec["search"]), *spec.binds, *mps),
            masked=database_files(spec.store),
            user=None if guest is None else guest.uid,
            group=None if guest is None else guest.gid,
            network=spec.network,
            memory_files_bytes=self.limits.memory_bytes or _MEMORY_FILES_BYTES,
            devices=device.nodes,
            host_memory_files=spec.mps_pipe is not None,
        )

    def _cycle(self) -> dict[str, Any] | None:
        resident = self.agent.seats[0].resident
        left = self.agent.choice.leftover(resident) if self.seat.tail and resident is not None else None
        return None if left is None else cycle_to_dict(left)

    def _profile_keeper(self) -> Callable[[], None]:
        """Called every tick: keep the profile in the store once the worker has measured it; tell when it will end."""
        job, path = self.job, self.directory / PROFILE
        kept, told_s = False, time.monotonic()

        def look() -> None:
            nonlocal kept, told_s
            if time.monotonic() - told_s > _TELL_S:
                told_s = time.monotonic()
                self.seat.busy_until_s = self.agent.choice.done_at_s(self.held.progress(), self.directory)
            if kept or not os.path.lexists(path):
                return
            try:
                measured = MeasuredJob.from_dict(hearsay.read_json(path))
            except (OSError, ValueError) as error:
                logger.warning("job %s: its profile cannot be read: %s", job.name, error)
                kept = True
                return
            self.agent.choice.remember(job, measured)
            key = self.agent.choice.key(job)

            def keep(store: JobStore) -> bool:
                store.keep_profile(key, measured.to_dict())
                return True

            kept = bool(self.agent.keeper.ask(keep))

        return look
