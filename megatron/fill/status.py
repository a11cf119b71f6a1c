"""The state of a job and what brought it there, as values.

Programs compare ``Cause``; text for people is made from the tables here where it is shown, and is never read back.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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


class Cause(StrEnum):
    """The cause of a job's state: how its latest attempt ended, or why it waits."""

    NONE = ""  # there is none, or none is known
    # Reported by the worker, whose report is not trusted.
    FINISHED = "finished"
    FAILED = "failed"  # its code raised an exception, or its command exited with an error
    STOPPED = "stopped"  # it stopped before its end
    CROWDED = "crowded"  # it stopped since it could not give memory back
    DOES_NOT_FIT = "does-not-fit"  # no plan for it fits the bubbles; also found by the agent
    # The worker ended without a report.
    OUT_OF_MEMORY = "out-of-memory"  # ended by the kernel
    SIGNAL = "signal"
    EXITED = "exited"
    # The agent decided to end it.
    CLAIM_LOST = "claim-lost"
    KILLED = "killed"  # by pipefill kill
    TRAINING_ENDED = "training-ended"
    CANCELLED = "cancelled"
    CANCELLED_RUNNING = "cancelled-running"
    TIMEOUT = "timeout"
    MOVES = "moves"
    MEMORY_NEEDED = "memory-needed"  # by the training
    LATE = "late"  # it did not stop in time
    # The agent ended it for a violation.
    LIMIT = "limit"  # of memory or processes
    OUTPUT = "output"
    OVERTIME = "overtime"
    OVERRUN = "overrun"
    HUNG = "hung"
    GAVE_UP = "gave-up"  # it stopped without being asked to
    # It did not begin.
    NOT_ALLOWED = "not-allowed"
    NO_MEMORY = "no-memory"
    QUOTA = "quota"  # of its user
    NOT_STARTED = "not-started"
    # Its agent is gone, or failed.
    AGENT_FAILED = "agent-failed"
    AGENT_DIED = "agent-died"
    LEASE_EXPIRED = "lease-expired"
    EVALUATED = "evaluated"  # by pipefill evaluate, outside of a training
    # Found by the report.
    AGENT_GONE = "agent-gone"  # its record ends while the job ran
    AGENT_LOST = "agent-lost"  # its lease has expired
    AGENT_KILLED = "agent-killed"  # its lease has not expired yet
    ELSEWHERE = "elsewhere"  # another run has the job
    NO_RANK_FREE = "no-rank-free"
    NOT_SUBMITTED = "not-submitted"
    UNKNOWN = "unknown"  # neither the records nor the store have it

    @property
    def died(self) -> bool:
        """True if the worker ended without a report, and was not ended by the agent."""
        return self in (Cause.OUT_OF_MEMORY, Cause.SIGNAL, Cause.EXITED)


class Then(StrEnum):
    """The next step of a job, for people."""

    NONE = ""
    # Reported by the worker.
    SAVED = "saved"
    RESTARTS = "restarts"
    COMMAND_RESTARTS = "command-restarts"
    MEASURED_SAVED = "measured-saved"  # it was only measured so far
    MEASURED_RESTARTS = "measured-restarts"
    # Decided by the agent.
    RESUMES = "resumes"
    BEGINS_AGAIN = "begins-again"
    TRIED_AGAIN = "tried-again"
    DIED_IN_A_ROW = "died-in-a-row"
    DIED_TOO_OFTEN = "died-too-often"


# Text for people; {} is the detail.
CAUSES: dict[Cause, str] = dict.fromkeys(Cause, "{}") | {
    Cause.DOES_NOT_FIT: "does not fit {device}: {}",
    Cause.SIGNAL: "the worker was killed by {}",
    Cause.EXITED: "the worker exited with status {}",
    Cause.CLAIM_LOST: "the store was out of reach for longer than its lease: another agent may have it",
    Cause.KILLED: "ended by pipefill kill",
    Cause.TRAINING_ENDED: "the main job ended first",
    Cause.CANCELLED: "cancelled",
    Cause.CANCELLED_RUNNING: "cancelled while it ran",
    Cause.TIMEOUT: "it ran for longer than its timeout of {} s",
    Cause.MOVES: "it moves to a rank that is idle",
    Cause.OUTPUT: "printed more than {} MiB; its output has the beginning and the end",
    Cause.OVERTIME: "it used more than {} s of CPU time outside bubbles, though it was stopped there",
    Cause.GAVE_UP: "the worker gave up without being asked to",
    Cause.NO_MEMORY: "too little memory: {}",
    Cause.QUOTA: "its user {}, the quota; it waits",
    Cause.NOT_STARTED: "it could not be started: {}",
    Cause.AGENT_FAILED: "its agent failed: {}",
    Cause.AGENT_DIED: "its agent died",
    Cause.LEASE_EXPIRED: "{} was not heard of in time",
    Cause.EVALUATED: "pipefill evaluate did {} checkpoints; it goes on in the next training",
    Cause.AGENT_GONE: "its agent went without a word while it ran; pipefill list tells where it is now",
    Cause.AGENT_LOST: "its agent is gone; it goes on when a training serves its store again",
    Cause.AGENT_KILLED: "its agent was killed; it goes back to the queue when the lease ends",
    Cause.ELSEWHERE: "another run has it: {}",
    Cause.NO_RANK_FREE: "no rank has been free for it",
    Cause.NOT_SUBMITTED: "it was not submitted; the agents' logs say why",
    Cause.UNKNOWN: "no agent had it; pipefill list tells where it is now",
}
_MEASURED = "; it was only measured so far, which pipefill profile JOBS.yaml --store STORE does beforehand"
_SAVED, _RESTARTS = "; goes on from its checkpoint", "; it begins again from its start"
FOLLOWS: dict[Then, str] = {
    Then.NONE: "",
    Then.SAVED: _SAVED,
    Then.RESTARTS: _RESTARTS,
    Then.COMMAND_RESTARTS: "; a command begins again from its start",
    Then.MEASURED_SAVED: _MEASURED + _SAVED,
    Then.MEASURED_RESTARTS: _MEASURED + _RESTARTS,
    Then.RESUMES: "; it goes on from its last checkpoint",
    Then.BEGINS_AGAIN: "; it begins again",
    Then.TRIED_AGAIN: "; it is tried again",
    Then.DIED_IN_A_ROW: ", {} times in a row without having saved anything",
    Then.DIED_TOO_OFTEN: "; it died {} times here",
}


def why(cause: Cause, detail: str = "", device: str = "") -> str:
    """Return the cause as text; the attributes of ``Status``."""
    return CAUSES[cause].format(detail, device=device)


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
        return self.why + FOLLOWS[self.then].format(self.deaths) + retry + unheard
