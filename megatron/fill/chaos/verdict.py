"""Whether a job of a chaos run ended as its fault demands, and how many faults it really had."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.chaos.kinds import Kind, Source
from megatron.fill.chaos.marks import Event, Mark, read
from megatron.fill.store.port import Job


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that was put into the queue.

    Attributes:
        steps: all its work.
        notes: the file of its marks.
    """

    id: int
    name: str
    kind: Kind
    steps: int
    notes: Path

    def faults(self) -> list[Mark]:
        """The faults that it committed itself."""
        return read(self.notes, Event.FAULT) if self.kind.source in (Source.TASK, Source.GPU) else []


@dataclass(frozen=True, slots=True)
class Lost:
    """A job that is not what its kind demands: it has not ended, ended in another way, or with other work done."""

    job: str
    kind: str
    why: str


def judge(submitted: Submitted, job: Job) -> Lost | None:
    """None if all is well with it."""
    kind = submitted.kind
    if not job.state.finished:
        why = f"it is still {job.state} after {job.attempt} attempts: {job.reason or 'no reason'}"
    elif job.state is not kind.state or not re.search(kind.reason, job.reason):
        reason = f" with {kind.reason!r}" if kind.reason else ""
        why = f"it is {job.state}: {job.reason or 'no reason'}; expected {kind.state}{reason}"
    elif kind.exact and job.progress.work_done != submitted.steps:
        why = f"it did {job.progress.work_done:g} of {submitted.steps} steps"
    else:
        return None
    return Lost(job.name, kind.name, why)
