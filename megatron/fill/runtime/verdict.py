"""What becomes of a job when its worker has ended: what was cut off goes back, what only ever dies does not."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.runtime.spec import Outcome
from megatron.fill.store.port import Job, Standing
from megatron.fill.types import JobState

OVER = "the main job ended first"
MOVES = "it moves to a rank that is idle"
TIMEOUT = "it ran for longer than its timeout"
_CRASHES = 3  # in a row and without a checkpoint in between: then an agent gives a job up
_ALL_CRASHES = 12  # whatever it says that it saved


@dataclass(frozen=True, slots=True)
class End:
    """How a worker ended.

    Attributes:
        crashed: it died without a word.
        standing: whose the job was then.
        stopped: why it was asked to save and stop; empty if it was not.
        late: it did not stop in time, and was ended for that.
        cut: why it was ended at once through no fault of its own; empty if it was not.
        saved: it left a checkpoint of its own, so something was gained.
        kept: there is a checkpoint, of whichever attempt.
        request: what the main job wanted of it when memory was short; empty for nothing.
        over: the main job has ended.
    """

    outcome: Outcome
    crashed: bool = False
    standing: Standing = Standing.HELD
    stopped: str = ""
    late: bool = False
    cut: str = ""
    saved: bool = False
    kept: bool = False
    request: str = ""
    over: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the store should know.

    Attributes:
        failed: the job has failed; QUEUED then means that it may be tried again.
    """

    state: JobState
    reason: str
    failed: bool = False


class Judge:
    """Judges the jobs of one agent, and remembers how often their workers died there."""

    def __init__(self) -> None:
        self._deaths: dict[int, tuple[int, int]] = {}  # by job: in a row, and in all

    def verdict(self, job: Job, end: End) -> Verdict:
        """What becomes of the job; one that has failed is tried again as often as it asks for."""
        state, reason = self._judge(job, end)
        if state is not JobState.FAILED:
            return Verdict(state, reason)
        self._deaths.pop(job.id, None)
        before, most = job.progress.failures, job.spec.get("retries", 0)
        if before >= most:
            return Verdict(JobState.FAILED, reason, failed=True)
        return Verdict(JobState.QUEUED, f"{reason}; retry {before + 1} of {most}", failed=True)

    def _judge(self, job: Job, end: End) -> tuple[JobState, str]:
        outcome = end.outcome
        succeeded = outcome.state is JobState.SUCCEEDED
        if end.standing is Standing.CANCELLED and not succeeded:
            return JobState.CANCELLED, "cancelled while it ran"
        if end.stopped == TIMEOUT and not succeeded:
            return JobState.FAILED, f"{TIMEOUT} of {job.spec['timeout_s']:g} s"
        # On a busy machine it may be slow to stop through no fault of its own, and nothing was asked of it but that.
        too_slow = end.late and end.stopped in (MOVES, OVER)
        if end.cut or too_slow or (end.crashed and end.stopped):
            again = "it goes on from its last checkpoint" if end.kept else "it begins again"
            return JobState.QUEUED, f"{end.cut or end.stopped}; {again}"
        gave_up = outcome.state is JobState.QUEUED and not outcome.unfit
        if not end.crashed and not gave_up:
            return outcome.state, outcome.reason
        cause = end.stopped or (end.over and OVER) or (outcome.crowded and end.request)
        if gave_up and cause:
            return outcome.state, f"{cause}; {outcome.reason}"
        return self._died(job, "the worker gave up without being asked to" if gave_up else outcome.reason, end.saved)

    def _died(self, job: Job, reason: str, saved: bool) -> tuple[JobState, str]:
        in_a_row, in_all = self._deaths.get(job.id, (0, 0))
        self._deaths[job.id] = in_a_row, in_all = (1 if saved else in_a_row + 1), in_all + 1
        if in_a_row >= _CRASHES:
            return JobState.FAILED, f"{reason}, {_CRASHES} times in a row without having saved anything"
        if in_all >= _ALL_CRASHES:
            return JobState.FAILED, f"{reason}; it died {_ALL_CRASHES} times here"
        return JobState.QUEUED, f"{reason}; it is tried again"
