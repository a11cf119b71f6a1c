"""What the agent hands a worker, as a file, and what the worker leaves in the step log."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.fill.device.emulated import Emulation
from megatron.fill.device.port import Limits, Sharing
from megatron.fill.pages.steplog import MOST_WORD_BYTES, StepLog
from megatron.fill.profiles import is_amount
from megatron.fill.sandbox.cage import Cage
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.spec import Spec
from megatron.fill.types import JobState
from megatron.fill.untrusted import parse_json, plain, to_json
from megatron.fill.work import Work


@dataclass(frozen=True, slots=True)
class WorkerSpec(Spec):
    """One worker's job.

    Attributes:
        environment: of the worker itself: what its libraries and its device need.
        board_fd: where the rank shows its bubble cycle.
        control_fd: whether filling is on at all.
        baton_fd: what the resident job and the tail job share.
        tail: this is the tail job: it gets what the resident job leaves of each bubble.
        cycle: the bubbles to plan for, as JSON, instead of those on the board; given to a tail job.
        profiles: the job's profiles as JSON, one per configuration; None if it has to be measured.
        checkpoint_s: how often a resumable task is saved, in seconds.
        env: the job's own variables and what it is told of itself; they count once nothing of it can do harm.
        emulate: how the CPU is to behave as a device that does not preempt; None for as it is.
        margin_bytes: device memory that is to stay free; what a plan keeps to where ``limits`` has no cap.
    """

    name: str
    directory: str
    gate_fd: int
    board_fd: int
    control_fd: int
    baton_fd: int
    cage: Cage
    work: Work
    environment: dict[str, str] = field(default_factory=dict)
    tail: bool = False
    cycle: dict[str, Any] | None = None
    profiles: list[dict[str, Any]] | None = None
    checkpoint_s: float = 300.0
    margin_bytes: int = 0
    device: str = "cpu"
    cpus: list[int] = field(default_factory=list)
    emulate: Emulation | None = None
    limits: Limits = field(default_factory=Limits)
    sharing: Sharing = Sharing.TIMESLICE
    env: dict[str, str] = field(default_factory=dict)

    def context(self) -> TaskContext:
        """What its task is given."""
        index, count = self.work.array or (0, 1)
        directory, memory_bytes = Path(self.directory), self.limits.memory_bytes
        return TaskContext(self.name, directory, self.device, memory_bytes, index=index, count=count)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a worker says that its job ended.

    Attributes:
        state: QUEUED when the main job ended first, when the job does not fit here (``unfit``), or when it could not
            shrink as it was asked to (``crowded``).
    """

    state: JobState
    reason: str
    unfit: bool = False
    unit: str = "steps"
    total_work: float | None = None
    result: dict[str, Any] = field(default_factory=dict)
    crowded: bool = False

    def leave(self, log: StepLog) -> None:
        """Leave it where the agent finds it, whatever becomes of the disk; a result that is too large stays behind."""
        for outcome in (self, replace(self, result={})):
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # a result that has no JSON form
                word = to_json(asdict(outcome)).encode()
                if len(word) <= MOST_WORD_BYTES:
                    log.leave_word(word)
                    return

    @classmethod
    def left(cls, log: StepLog) -> Outcome | None:
        """What the worker left; None if it left nothing, or nothing that makes sense: a job can write what it likes."""
        try:
            data = parse_json(log.word)
            outcome = cls(**data | {"state": JobState(data["state"])})
        except (ValueError, TypeError, KeyError):
            return None
        total = outcome.total_work
        sane = (
            isinstance(outcome.reason, str)
            and isinstance(outcome.unit, str)
            and isinstance(outcome.unfit, bool)
            and isinstance(outcome.crowded, bool)
            and isinstance(outcome.result, dict)
            and (total is None or is_amount(total))
        )
        if not sane or outcome.state in (JobState.RUNNING, JobState.CANCELLED):
            return None
        return replace(outcome, reason=plain(outcome.reason), unit=plain(outcome.unit))
