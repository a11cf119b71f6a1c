"""One of an agent's two seats: takes a job, has it run in a worker, and tells the store how it ended."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.fill.planner.cycles import cycle_to_dict
from megatron.fill.runtime.choice import Resident
from megatron.fill.runtime.enforcer import Enforcer
from megatron.fill.runtime.jobrun import OUTPUT, JobRun
from megatron.fill.runtime.keeper import Held, progress_of
from megatron.fill.runtime.profiler import PROFILE
from megatron.fill.runtime.spec import Outcome, WorkerSpec
from megatron.fill.runtime.steplog import StepLog, create_log
from megatron.fill.sidetask.base import RESULT
from megatron.fill.store.port import Claim, Job, JobStore, Standing
from megatron.fill.types import JobRecord, JobState

if TYPE_CHECKING:
    from megatron.fill.runtime.agent import Agent

logger = logging.getLogger("pipefill.agent")

_CRASHES = 3  # in a row and without a checkpoint in between: then an agent gives a job up
_LOST = "the store was out of reach for longer than its lease: another agent may have it"
_TELL_S = 5.0  # how often the end of the job is estimated anew
_SAY_S = 8.0  # how long the end of a job is told to a store that does not answer


class Seat:
    """Serves one job after the other.

    Attributes:
        job_name: the job that sits here; empty for none.
        resident: that job and its folder, while its worker runs.
        busy_until_s: when it is expected to be done, in seconds since the epoch; None without a job, infinity if
            nobody knows.
    """

    def __init__(self, agent: Agent, tail: bool) -> None:
        self.agent = agent
        self.tail = tail
        self.job_name = ""
        self.busy_until_s: float | None = None
        self.resident: Resident | None = None

    def __str__(self) -> str:
        return "tail job" if self.tail else "resident job"

    def serve(self) -> bool:
        """Run the next job, if there is one for this seat; whether there was."""
        agent = self.agent
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
            self._run(claim)
        finally:
            self.job_name, self.busy_until_s, self.resident = "", None, None
            agent.keeper.look_again()
        return True

    def _run(self, claim: Claim) -> None:
        agent = self.agent
        directory = self._folder(claim.job)
        if directory is None or not agent.keeper.ask(lambda store: store.place(claim, str(directory)), _SAY_S):
            return  # lost already, or nobody hears us: the lease runs out
        logger.info("job %s: starting as the %s", claim.job.name, self)
        log_fd = create_log()
        log = StepLog(log_fd)
        began_s, began_at_s = time.monotonic(), time.time()
        held = Held(claim, lambda: progress_of(claim.job, log, began_s))
        agent.keeper.hold(held)
        self.resident = Resident(claim.job, directory)
        worker = agent.start_worker(self._worker_spec(claim, directory, log_fd), log_fd)
        os.close(log_fd)
        spec = agent.spec
        enforcer = Enforcer(worker.pid, agent.gate, log, spec.grace_ns, spec.max_overruns, spec.device == "cpu")
        keep_profile = self._profile_keeper(held, directory)
        run = JobRun(
            worker,
            log,
            directory,
            enforcer,
            spec.max_output_bytes,
            stop=lambda: self._why_stop(held),
            lost=lambda: _LOST if held.standing is Standing.LOST else "",
            tick=keep_profile,
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
        state, reason = self._judge(held, outcome, crashed, saved)
        if held.standing is not Standing.LOST and not agent.keeper.finish(held, state, reason, outcome.result, _SAY_S):
            reason += " (the store did not hear of it)"
        if outcome.unfit:
            agent.choice.unfit(claim.job.id, self.tail)
        logger.info("job %s: %s %s", claim.job.name, state, reason)
        agent.keep_record(
            JobRecord(
                name=claim.job.name,
                what=_what(claim.job),
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
            ),
            log.record(claim.job.name, spec.rank),
        )

    def _why_stop(self, held: Held) -> str:
        if self.agent.over:
            return "the main job is over"
        if held.standing is Standing.CANCELLED:
            return "it was cancelled"
        return ""

    def _judge(self, held: Held, outcome: Outcome, crashed: bool, saved: bool) -> tuple[JobState, str]:
        """What the store should know: a job that was cut off goes back, one that only ever dies does not.

        Args:
            crashed: the worker died without a word.
            saved: it had written a checkpoint before, so something was gained.
        """
        if held.standing is Standing.CANCELLED and outcome.state is not JobState.SUCCEEDED:
            return JobState.CANCELLED, "cancelled while it ran"
        if held.standing is Standing.LOST:
            return JobState.QUEUED, _LOST
        if not crashed:
            return outcome.state, outcome.reason
        crashes = self.agent.crashes
        number = held.claim.job.id
        crashes[number] = 1 if saved else crashes.get(number, 0) + 1
        if crashes[number] < _CRASHES:
            return JobState.QUEUED, f"{outcome.reason}; it is tried again"
        return JobState.FAILED, f"{outcome.reason}, {_CRASHES} times in a row without having saved anything"

    def _folder(self, job: Job) -> Path | None:
        """The job's folder: where it was before, or in the run folder; None if it cannot be made."""
        here = self.agent.run_dir / "jobs" / f"{job.name}-{job.id}"
        for directory in [Path(job.directory)] * bool(job.directory) + [here]:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                Outcome.discard(directory)
                (directory / PROFILE).unlink(missing_ok=True)
                (directory / RESULT).unlink(missing_ok=True)
                if (directory / OUTPUT).exists():  # of an earlier attempt
                    os.replace(directory / OUTPUT, directory / f"output-{job.attempt - 1}.log")
            except OSError as error:
                logger.warning("job %s: its folder %s cannot be used: %s", job.name, directory, error)
            else:
                return directory
        return None

    def _worker_spec(self, claim: Claim, directory: Path, log_fd: int) -> Path:
        agent, job = self.agent, claim.job
        spec = WorkerSpec(
            name=job.name,
            directory=str(directory),
            gate_fd=agent.spec.gate_fd,
            log_fd=log_fd,
            board_fd=agent.spec.board_fd,
            baton_fd=agent.baton_fd,
            parent=os.getpid(),
            tail=self.tail,
            cycle=self._cycle(),
            profiles=agent.choice.profile_of(job),
            checkpoint_s=agent.spec.checkpoint_s,
            device=agent.spec.device,
            cpus=agent.spec.cpus,
            task=job.spec["task"],
            command=job.spec["command"],
            args=job.spec["args"],
            memory_bytes=job.spec["memory_bytes"],
            search=job.spec["search"],
        )
        path = directory / "spec.json"
        path.write_text(spec.to_json(), encoding="utf-8")
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
                content: dict[str, Any] = json.loads((directory / PROFILE).read_text(encoding="utf-8"))
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


def _what(job: Job) -> str:
    import shlex

    return job.spec["task"] or shlex.join(job.spec["command"])
