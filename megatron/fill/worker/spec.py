"""Messages between an agent and a worker: the spec file, the sandbox, and the outcome of the job with its reason."""

from __future__ import annotations

import contextlib
import resource
import socket
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.fill.device.port import Limits, Sharing
from megatron.fill.display import mib
from megatron.fill.errors import FillError
from megatron.fill.pages.steplog import MOST_WORD_BYTES, StepLog
from megatron.fill.profiles import BubbleCycle, JobProfile, is_amount
from megatron.fill.sandbox.config import Sandbox
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.spec import Spec
from megatron.fill.status import Cause, JobState, Status, Then
from megatron.fill.untrusted import parse_json, plain, to_json
from megatron.fill.work import Work


@dataclass(frozen=True, slots=True)
class WorkerSpec(Spec):
    """The job, the limits and the sandbox of a worker."""

    name: str
    directory: str
    gate_fd: int
    board_fd: int  # descriptor of the page with the rank's bubble cycle
    control_fd: int  # descriptor of the control page, which switches filling on and off
    baton_fd: int  # descriptor of the baton, which the resident job and the tail job share
    sandbox: Sandbox
    work: Work
    # Environment of the worker itself, with the variables for its libraries and its device.
    environment: dict[str, str] = field(default_factory=dict)
    tail: bool = False  # True for the tail job, which gets the rest of each bubble after the resident job
    # The bubbles to plan for, instead of those on the board; given to a tail job.
    cycle: BubbleCycle | None = None
    # The job's profiles, one per configuration; None if it has to be measured.
    profiles: tuple[JobProfile, ...] | None = None
    checkpoint_s: float = 300.0  # time in seconds between two checkpoints of a resumable task
    margin_bytes: int = 0  # device memory that must stay free; plans use it if ``limits`` has no memory cap
    device: str = "cpu"
    cpus: list[int] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    sharing: Sharing = Sharing.TIMESLICE
    # The job's own variables and ``PIPEFILL_*``; set once the job is in its sandbox.
    env: dict[str, str] = field(default_factory=dict)

    def context(self) -> TaskContext:
        index, count = self.work.instance
        directory, memory_bytes = Path(self.directory), self.limits.memory_bytes
        return TaskContext(self.name, directory, self.device, memory_bytes, index=index, count=count)


# States of a job by its worker's report; it may report no other causes.
_STATES = {Cause.FINISHED: JobState.SUCCEEDED, Cause.FAILED: JobState.FAILED}
_STATES |= dict.fromkeys((Cause.STOPPED, Cause.CROWDED, Cause.DOES_NOT_FIT), JobState.QUEUED)
_MOST_REPORT_BYTES = 1 << 16
_FOLLOWS = (Then.NONE, Then.SAVED, Then.RESTARTS, Then.COMMAND_RESTARTS, Then.MEASURED_SAVED, Then.MEASURED_RESTARTS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A worker's report of its job's end, or the agent's substitute for it."""

    cause: Cause
    detail: str = ""  # message of a failure, for people
    then: Then = Then.NONE  # state in which the job was left, for people
    unit: str = "steps"
    total_work: float | None = None
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """The status of the job if nobody knows better than its worker."""
        return Status(_STATES.get(self.cause, JobState.FAILED), self.cause, self.detail)

    def leave(self, log: StepLog) -> None:
        """Leave the report in the step log, which needs no disk; a result that is too large is left to its file."""
        bounded = replace(self, detail=plain(self.detail))  # a message may be of any length
        for outcome in (bounded, replace(bounded, result={})):
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # a result that has no JSON form
                word = to_json(asdict(outcome)).encode()
                if len(word) <= MOST_WORD_BYTES:
                    log.leave_word(word)
                    return

    @classmethod
    def left(cls, log: StepLog) -> Outcome | None:
        """Return the report in the step log; None if there is none, or an invalid one, since jobs can write there."""
        try:
            data = parse_json(log.word)
            outcome = cls(**data | {"cause": Cause(data["cause"]), "then": Then(data["then"])})
        except (ValueError, TypeError, KeyError):
            return None
        total = outcome.total_work
        sane = (
            outcome.cause in _STATES
            and outcome.then in _FOLLOWS
            and isinstance(outcome.detail, str)
            and isinstance(outcome.unit, str)
            and isinstance(outcome.result, dict)
            and (total is None or is_amount(total))
        )
        return replace(outcome, detail=plain(outcome.detail), unit=plain(outcome.unit)) if sane else None


@dataclass(frozen=True, slots=True)
class SandboxReport(Spec):
    """The report of a worker's first process to its agent."""

    init: int = 0  # pid of the first process in the job's own process namespace
    pid: int = 0  # the job's process and process group
    lacking: tuple[str, ...] = ()  # the sandbox layers that are missing on this machine
    error: str = ""  # the reason why the job was not started; empty if it was

    def send(self, channel: socket.socket) -> None:
        channel.send(self.to_json().encode()[:_MOST_REPORT_BYTES])

    @classmethod
    def receive(cls, channel: socket.socket) -> SandboxReport | None:
        """Return the next report; None if the other side ended before reporting."""
        data = channel.recv(_MOST_REPORT_BYTES)
        return cls.from_json(data.decode()) if data else None


def why_failed(error: BaseException, callback: str, context: TaskContext) -> str:
    """The reason of a failure in ``callback``; call it in the process that failed, whose peak of memory it names."""
    where = f" in {callback}()" if callback else ""
    if isinstance(error, SystemExit):
        return f"the task called sys.exit({error.code!r}){where}"
    if isinstance(error, FillError):
        return str(error)
    try:
        text = str(error)
    except Exception:  # its own code
        text = "it has no text, as its __str__() fails"
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, MemoryError) or "can't allocate memory" in message or "out of memory" in message:
        peak, limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, context.memory_bytes
        cap = f"over its cap of {mib(limit)}" if limit else "out of memory"
        # On the CPU the kernel counts what is asked for, used or not (RLIMIT_DATA), and refuses what would be too much.
        if limit and context.device == "cpu" and peak < limit:
            cap = f"an allocation was refused within its cap of {mib(limit)}"
        return f"{cap}{where}, with a peak of {mib(peak)}: {message}"
    return f"{message}{where}"
