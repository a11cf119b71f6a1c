"""The end of a worker: decisions to end it, and the policy for its job; an interrupted job is queued again, say."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

from megatron.fill.status import Cause, JobState, Status, Then
from megatron.fill.store.port import Job, Standing
from megatron.fill.worker.spec import Outcome

logger = logging.getLogger("pipefill.agent")

_CRASHES = 3  # crashes in a row without a checkpoint in between, after which the job has failed
_ALL_CRASHES = 12  # crashes in all, after which it has failed in spite of checkpoints


class How(IntEnum):
    """Ways to end a worker by severity; a more severe decision replaces a milder one."""

    STOP = 1  # asked to save and stop
    LATE = 2  # asked to, did not stop in time, and killed
    FAIL = 3  # killed for a violation
    CUT = 4  # killed through no fault of its own


@dataclass(frozen=True, slots=True)
class Ending:
    """A decision to end a worker.

    Attributes:
        detail: figures or text for people.
        stop: cause of an earlier request to stop; NONE if there was none.
    """

    how: How
    cause: Cause
    detail: str = ""
    stop: Cause = Cause.NONE


class Watcher(Protocol):
    """Checks one condition under which a worker has to end."""

    def look(self) -> Ending | None:
        """Check once; None while the worker may go on.

        The thread that watches the worker calls this a few times a second.
        """


def harshest(watchers: Iterable[Watcher]) -> Ending | None:
    """Ask all watchers, and return the most severe decision (the first one if several are as severe)."""
    found = [ending for watcher in watchers if (ending := watcher.look()) is not None]
    return max(found, key=lambda ending: ending.how, default=None)


@dataclass(frozen=True, slots=True)
class End:
    """The end of a worker.

    Attributes:
        outcome: the worker's own report, or a substitute if it left none or was killed.
        ending: the agent's decision to end it; None if it ended by itself.
        standing: state of the claim at the end.
        saved: this attempt left a checkpoint.
        kept: there is a checkpoint, of this or an earlier attempt.
        request: reason of a request to give memory back to the training; empty if there was none.
        over: the training has ended.
        unfit: the job must not be tried here again before the bubble cycle changes.
        violations: number of violations of the worker's bubbles (``Enforcer``).
        ended_ns: time of the end, CLOCK_MONOTONIC.
    """

    outcome: Outcome
    ending: Ending | None = None
    standing: Standing = Standing.HELD
    saved: bool = False
    kept: bool = False
    request: str = ""
    over: bool = False
    unfit: bool = False
    violations: int = 0
    ended_ns: int = 0


class Judge:
    """Decides on the jobs of one agent, and counts their crashes there; each job is for one thread at a time."""

    def __init__(self) -> None:
        self._deaths: dict[int, tuple[int, int]] = {}  # by job: in a row, and in all

    def verdict(self, job: Job, end: End) -> Status:
        """Return the job's new status; a job that has failed is queued again for as many retries as it asks for."""
        status = self._judge(job, end)
        if status.state is not JobState.FAILED:
            return status
        self._deaths.pop(job.id, None)
        before, most = job.progress.failures, job.work.retries
        if before >= most:
            return status
        return replace(status, state=JobState.QUEUED, retry=before + 1, retries=most)

    def _judge(self, job: Job, end: End) -> Status:
        outcome = end.outcome
        if outcome.cause is Cause.FINISHED:
            return outcome.status
        if end.standing is Standing.CANCELLED:
            return Status(JobState.CANCELLED, Cause.CANCELLED_RUNNING)
        gave_back = outcome.cause in (Cause.STOPPED, Cause.CROWDED)
        again = Then.RESUMES if end.kept else Then.BEGINS_AGAIN
        match end.ending:
            case Ending(How.STOP, Cause.TIMEOUT) | Ending(stop=Cause.TIMEOUT):
                return Status(JobState.FAILED, Cause.TIMEOUT, f"{job.work.timeout_s:g}")
            case Ending(How.CUT, cause, detail):
                return Status(JobState.QUEUED, cause, detail, again)
            # On a busy machine a job may be slow to stop through no fault of its own.
            case Ending(How.LATE, stop=(Cause.MOVES | Cause.TRAINING_ENDED) as cause):
                return Status(JobState.QUEUED, cause, then=again)
            case Ending(How.STOP, cause, detail) if outcome.cause.died:
                return Status(JobState.QUEUED, cause, detail, again)
            case Ending(How.STOP, cause, detail) if gave_back:
                return Status(JobState.QUEUED, cause, detail, outcome.then)
        if gave_back and end.over:
            return Status(JobState.QUEUED, Cause.TRAINING_ENDED, then=outcome.then)
        if outcome.cause is Cause.CROWDED and end.request:
            return Status(JobState.QUEUED, Cause.MEMORY_NEEDED, end.request, outcome.then)
        if gave_back:
            return self._died(job, Status(JobState.FAILED, Cause.GAVE_UP), end.saved)
        return self._died(job, outcome.status, end.saved) if outcome.cause.died else outcome.status

    def _died(self, job: Job, status: Status, saved: bool) -> Status:
        in_a_row, in_all = self._deaths.get(job.id, (0, 0))
        self._deaths[job.id] = in_a_row, in_all = (1 if saved else in_a_row + 1), in_all + 1
        if in_a_row >= _CRASHES:
            return replace(status, then=Then.DIED_IN_A_ROW, deaths=_CRASHES)
        if in_all >= _ALL_CRASHES:
            return replace(status, then=Then.DIED_TOO_OFTEN, deaths=_ALL_CRASHES)
        return replace(status, state=JobState.QUEUED, then=Then.TRIED_AGAIN)


class NotStarted(Exception):
    """A job did not begin, through no fault of its own.  No process of it is left."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(cause, detail)
        self.status = Status(JobState.QUEUED, cause, detail)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Turn exceptions of this block into NotStarted.

    Raises:
        NotStarted: the block raised an exception.
    """
    try:
        yield
    except NotStarted:
        raise
    except OSError as error:  # for example a full disk: it may succeed on another rank, or here later
        raise NotStarted(Cause.NOT_STARTED, str(error)) from error
    except Exception as error:
        logger.exception("a job could not be started")
        raise NotStarted(Cause.NOT_STARTED, f"{type(error).__name__}: {error}") from error
