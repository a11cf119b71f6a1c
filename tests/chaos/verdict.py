"""The comparison of a job of a chaos run with the outcome that its fault must have."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.store.values import Job
from megatron.fill.types import JobState
from tests.chaos.kind import FaultKind, Source
from tests.chaos.kinds import COMMAND, HONEST
from tests.chaos.marks import Mark, Note, read


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that was submitted.

    Attributes:
        steps: amount of its work.
        notes: file of its marks.
    """

    id: int
    name: str
    kind: FaultKind
    steps: int
    notes: Path

    def faults(self) -> list[Mark]:
        """The marks of the faults that it committed itself."""
        driven = self.kind.source in (Source.VICTIM, Source.DRIVER)
        if driven or self.kind in (HONEST, COMMAND):
            return []
        # A job's environment has been in place once the job runs, also if nothing in it took effect.
        seen = read(self.notes, Note.FAULT)
        return seen or (read(self.notes, Note.READY) if self.kind.source is Source.BROUGHT else [])

    def through(self) -> list[Mark]:
        """Its marks of attempts that went through."""
        return read(self.notes, Note.THROUGH)

    def missed(self) -> list[Mark]:
        """Its marks of attempts without a target."""
        return read(self.notes, Note.MISSED)

    @property
    def tried(self) -> bool:
        """True if it attempted something, with or without success; False if it found no target."""
        return bool(self.faults()) and not (self.missed() and not self.through() and not self.held())

    def held(self) -> list[Mark]:
        """Its marks of attempts that were refused."""
        return read(self.notes, Note.HELD)


@dataclass(frozen=True, slots=True)
class Lost:
    """A job that is not as its kind demands: it has not ended, ended in another way, or did another amount of work."""

    job: str
    kind: str
    why: str


def judge(submitted: Submitted, job: Job) -> Lost | None:
    """Return why the job counts as lost; None if it is as its kind demands."""
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
