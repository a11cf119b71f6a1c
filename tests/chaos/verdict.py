"""Whether a job of a chaos run ended as its fault demands, and how many faults it really had."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.store.port import Job
from megatron.fill.types import JobState
from tests.chaos.kind import FaultKind, Source
from tests.chaos.kinds import COMMAND, HONEST
from tests.chaos.marks import Mark, Note, read


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that was put into the queue.

    Attributes:
        steps: all its work.
        notes: the file of its marks.
    """

    id: int
    name: str
    kind: FaultKind
    steps: int
    notes: Path

    def faults(self) -> list[Mark]:
        """The faults that it committed itself."""
        driven = self.kind.source in (Source.VICTIM, Source.DRIVER)
        if driven or self.kind in (HONEST, COMMAND):
            return []
        # What a job brings along has been there once the job runs, also where nothing of it took effect.
        seen = read(self.notes, Note.FAULT)
        return seen or (read(self.notes, Note.READY) if self.kind.source is Source.BROUGHT else [])

    def through(self) -> list[Mark]:
        """What it tried and got through with, by its own word."""
        return read(self.notes, Note.THROUGH)

    def missed(self) -> list[Mark]:
        """What it had nothing to try on, by its own word."""
        return read(self.notes, Note.MISSED)

    @property
    def tried(self) -> bool:
        """Whether it did something, or was kept from it: one that found no target has done nothing."""
        return bool(self.faults()) and not (self.missed() and not self.through() and not self.held())

    def held(self) -> list[Mark]:
        """What was refused to it, by its own word."""
        return read(self.notes, Note.HELD)


@dataclass(frozen=True, slots=True)
class Lost:
    """A job that is not what its kind demands: it has not ended, ended in another way, or with other work done."""

    job: str
    kind: str
    why: str


def judge(submitted: Submitted, job: Job) -> Lost | None:
    """None if all is well with it."""
    kind, through = submitted.kind, submitted.through()
    failed = kind.either and job.state is JobState.FAILED
    if kind.refused and through:
        why = f"got through: {through[0].detail}"
    elif not job.state.finished:
        why = f"it is still {job.state} after {job.attempt} attempts: {job.reason or 'no reason'}"
    elif not failed and (job.state is not kind.state or not re.search(kind.reason, job.reason)):
        reason = f" with {kind.reason!r}" if kind.reason else ""
        why = f"it is {job.state}: {job.reason or 'no reason'}; expected {kind.state}{reason}"
    elif not math.isfinite(job.progress.work_done):
        why = f"it is said to have done {job.progress.work_done} steps"
    elif not failed and kind.exact and job.progress.work_done != submitted.steps:
        why = f"it did {job.progress.work_done:g} of {submitted.steps} steps"
    else:
        return None
    return Lost(job.name, kind.name, why)
