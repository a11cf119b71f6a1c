"""The state of a job and what brought it there, as values.

Programs compare ``Cause``; text for people is made from the members' texts where it is shown, and is never read back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "QUEUED"  # waits for a device, to begin or to resume from its checkpoint (the training ended first)
    RUNNING = "RUNNING"  # an agent holds it
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def finished(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


class _Told(StrEnum):
    """Members that have a text for people besides their value."""

    text: str  # {} stands for a detail

    def __new__(cls, value: str, text: str = "{}") -> Self:
        its = str.__new__(cls, value)
        its._value_, its.text = value, text
        return its


class Cause(_Told):
    """The cause of a job's state: how its latest attempt ended, or why it waits."""

    NONE = ""  # there is none, or none is known
    # Reported by the worker, whose report is not trusted.
    FINISHED = "finished"
    FAILED = "failed"  # its code raised an exception, or its command exited with an error
    STOPPED = "stopped"  # it stopped before its end
    CROWDED = "crowded"  # it stopped since it could not give memory back
    DOES_NOT_FIT = "does-not-fit", "does not fit {device}: {}"  # no plan fits the bubbles; also found by the agent
    # The worker ended without a report.
    OUT_OF_MEMORY = "out-of-memory"  # ended by the kernel
    SIGNAL = "signal", "the worker was killed by {}"
    EXITED = "exited", "the worker exited with status {}"
    # The agent decided to end it.
    CLAIM_LOST = "claim-lost", "the store was out of reach for longer than its lease: another agent may have it"
    KILLED = "killed", "ended by pipefill kill"
    TRAINING_ENDED = "training-ended", "the main job ended first"
    WARDEN_DIED = "warden-died", "the warden of its agent died"
    KEEPER_DIED = "keeper-died", "the keeper of its agent died"
    CANCELLED = "cancelled", "cancelled"
    CANCELLED_RUNNING = "cancelled-running", "cancelled while it ran"
    TIMEOUT = "timeout", "it ran for longer than its timeout of {} s"
    MOVES = "moves", "it moves to a rank that is idle"
    MEMORY_NEEDED = "memory-needed"  # by the training
    LATE = "late"  # it did not stop in time
    # The agent ended it for a violation.
    LIMIT = "limit"  # of memory or processes
    OUTPUT = "output", "printed more than {} MiB; its output has the beginning and the end"
    OVERTIME = "overtime", "it used more than {} s of CPU time outside bubbles, though it was stopped there"
    OVERRUN = "overrun"
    HUNG = "hung"
    GAVE_UP = "gave-up", "the worker gave up without being asked to"
    # It did not begin.
    NOT_ALLOWED = "not-allowed"
    NO_MEMORY = "no-memory", "too little memory: {}"
    QUOTA = "quota", "its user {}, the quota; it waits"
    NOT_STARTED = "not-started", "it could not be started: {}"
    # Its agent is gone, or failed.
    AGENT_FAILED = "agent-failed", "its agent failed: {}"
    AGENT_DIED = "agent-died", "its agent died"
    LEASE_EXPIRED = "lease-expired", "{} was not heard of in time"
    # It ran outside of a training.
    EVALUATED = "evaluated", "pipefill evaluate did {} checkpoints; it goes on in the next training"
    # Found by the report; AGENT_KILLED until the lease has expired, AGENT_LOST from then on.
    AGENT_GONE = "agent-gone", "its agent went without a word while it ran; pipefill list tells where it is now"
    AGENT_LOST = "agent-lost", "its agent is gone; it goes on when a training serves its store again"
    AGENT_KILLED = "agent-killed", "its agent was killed; it goes back to the queue when the lease ends"
    ELSEWHERE = "elsewhere", "another run has it: {}"
    AFTER = "after", "it begins after {}"
    NO_RANK_FREE = "no-rank-free", "no rank has been free for it"
    NOT_SUBMITTED = "not-submitted", "it was not submitted; the agents' logs say why"
    UNKNOWN = "unknown", "no agent had it; pipefill list tells where it is now"  # neither the records nor the store do

    @property
    def died(self) -> bool:
        """True if the worker ended without a report, and was not ended by the agent."""
        return self in (Cause.OUT_OF_MEMORY, Cause.SIGNAL, Cause.EXITED)


_MEASURED = "; it was only measured so far, which pipefill profile JOBS.yaml --store STORE does beforehand"
_SAVED, _RESTARTS = "; goes on from its checkpoint", "; it begins again from its start"


class Then(_Told):
    """The next step of a job, for people."""

    NONE = "", ""
    # Reported by the worker.
    SAVED = "saved", _SAVED
    RESTARTS = "restarts", _RESTARTS
    COMMAND_RESTARTS = "command-restarts", "; a command begins again from its start"
    MEASURED_SAVED = "measured-saved", _MEASURED + _SAVED
    MEASURED_RESTARTS = "measured-restarts", _MEASURED + _RESTARTS
    # Decided by the agent.
    RESUMES = "resumes", "; it goes on from its last checkpoint"
    BEGINS_AGAIN = "begins-again", "; it begins again"
    TRIED_AGAIN = "tried-again", "; it is tried again"
    DIED_IN_A_ROW = "died-in-a-row", ", {} times in a row without having saved anything"
    DIED_TOO_OFTEN = "died-too-often", "; it died {} times here"


def why(cause: Cause, detail: str = "", device: str = "") -> str:
    """Return the cause as text; the attributes of ``Status``."""
    return cause.text.format(detail, device=device)


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a job, and what brought it there."""

    state: JobState
    cause: Cause = Cause.NONE
    detail: str = ""  # figures or text for people; the whole text if the cause has no text of its own
    then: Then = Then.NONE
    deaths: int = 0  # number of deaths, with DIED_IN_A_ROW and DIED_TOO_OFTEN
    retry: int = 0  # number of the retry that follows; 0 for none
    retries: int = 0  # number of retries that the job asks for
    device: str = ""  # device that it does not fit; otherwise empty
    unheard: bool = False  # True if the store does not have this status

    @property
    def failed(self) -> bool:
        """True if the attempt has failed; the job may be tried again."""
        return self.state is JobState.FAILED or self.retry > 0

    @property
    def why(self) -> str:
        """The cause, as text."""
        return why(self.cause, self.detail, self.device)

    @property
    def text(self) -> str:
        """The cause and what follows, as text; empty if there is nothing to say."""
        retry = f"; retry {self.retry} of {self.retries}" if self.retry else ""
        unheard = " (the store did not hear of it)" if self.unheard else ""
        return self.why + self.then.text.format(self.deaths) + retry + unheard
