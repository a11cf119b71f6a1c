"""Policy for a job whose worker has ended: an interrupted job is queued again, one that crashes repeatedly fails."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.agent.ending import Ending, How
from megatron.fill.store.port import Job, Standing
from megatron.fill.types import JobState
from megatron.fill.worker.spec import Outcome

OVER = "the main job ended first"
MOVES = "it moves to a rank that is idle"
TIMEOUT = "it ran for longer than its timeout"
_CRASHES = 3  # crashes in a row without a checkpoint in between, after which the job has failed
_ALL_CRASHES = 12  # crashes in all, after which it has failed in spite of checkpoints


@dataclass(frozen=True, slots=True)
class End:
    """The end of a worker.

    Attributes:
        outcome: the worker's own report, or a substitute if it left none.
        crashed: the worker ended without a report.
        ending: the agent's decision to end it; None if it ended by itself.
        standing: state of the claim at the end.
        saved: this attempt left a checkpoint.
        kept: there is a checkpoint, of this or an earlier attempt.
        request: reason of a request to give memory back to the training; empty if there was none.
        over: the training has ended.
        unfit: the job must not be tried here again before the bubble cycle changes.
        offences: number of violations of the worker's bubbles (``Enforcer``).
        ended_ns: time of the end, CLOCK_MONOTONIC.
    """

    outcome: Outcome
    crashed: bool = False
    ending: Ending | None = None
    standing: Standing = Standing.HELD
    saved: bool = False
    kept: bool = False
    request: str = ""
    over: bool = False
    unfit: bool = False
    offences: int = 0
    ended_ns: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The job's new state, for the store.

    Attributes:
        failed: the attempt has failed; with the state QUEUED, the job is tried again.
    """

    state: JobState
    reason: str
    failed: bool = False


class Judge:
    """Decides on the jobs of one agent, and counts their crashes there; each job is for one thread at a time."""

    def __init__(self) -> None:
        self._deaths: dict[int, tuple[int, int]] = {}  # by job: in a row, and in all

    def verdict(self, job: Job, end: End) -> Verdict:
        """Return the job's new state; a job that has failed is queued again for as many retries as it asks for."""
        state, reason = self._judge(job, end)
        if state is not JobState.FAILED:
            return Verdict(state, reason)
        self._deaths.pop(job.id, None)
        before, most = job.progress.failures, job.work.retries
        if before >= most:
            return Verdict(JobState.FAILED, reason, failed=True)
        return Verdict(JobState.QUEUED, f"{reason}; retry {before + 1} of {most}", failed=True)

    def _judge(self, job: Job, end: End) -> tuple[JobState, str]:
        outcome = end.outcome
        if outcome.state is JobState.SUCCEEDED:
            return outcome.state, outcome.reason
        if end.standing is Standing.CANCELLED:
            return JobState.CANCELLED, "cancelled while it ran"
        gave_up = outcome.state is JobState.QUEUED and not outcome.unfit
        again = "it goes on from its last checkpoint" if end.kept else "it begins again"
        match end.ending:
            case Ending(How.STOP, why) | Ending(stop=why) if why == TIMEOUT:
                return JobState.FAILED, f"{TIMEOUT} of {job.work.timeout_s:g} s"
            case Ending(How.CUT, why):
                return JobState.QUEUED, f"{why}; {again}"
            # On a busy machine a job may be slow to stop through no fault of its own.
            case Ending(How.LATE, stop=why) if why in (MOVES, OVER):
                return JobState.QUEUED, f"{why}; {again}"
            case Ending(How.STOP, why) if end.crashed:
                return JobState.QUEUED, f"{why}; {again}"
            case Ending(How.STOP, why) if gave_up:
                return outcome.state, f"{why}; {outcome.reason}"
        cause = OVER if end.over else end.request if outcome.crowded else ""
        if gave_up and cause:
            return outcome.state, f"{cause}; {outcome.reason}"
        if gave_up:
            return self._died(job, "the worker gave up without being asked to", end.saved)
        return self._died(job, outcome.reason, end.saved) if end.crashed else (outcome.state, outcome.reason)

    def _died(self, job: Job, reason: str, saved: bool) -> tuple[JobState, str]:
        in_a_row, in_all = self._deaths.get(job.id, (0, 0))
        self._deaths[job.id] = in_a_row, in_all = (1 if saved else in_a_row + 1), in_all + 1
        if in_a_row >= _CRASHES:
            return JobState.FAILED, f"{reason}, {_CRASHES} times in a row without having saved anything"
        if in_all >= _ALL_CRASHES:
            return JobState.FAILED, f"{reason}; it died {_ALL_CRASHES} times here"
        return JobState.QUEUED, f"{reason}; it is tried again"
