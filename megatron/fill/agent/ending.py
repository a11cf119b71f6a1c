"""Decisions not to start a worker, or to end it, and what may make them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from megatron.fill.status import Cause, Status


@dataclass(eq=False)
class NotStarted(Exception):
    """A job does not begin."""

    status: Status  # the job's from then on


class How(IntEnum):
    """Ways to end a worker by severity; a more severe decision replaces a milder one."""

    STOP = 1  # asked to save and stop
    LATE = 2  # asked to, did not stop in time, and killed
    FAIL = 3  # killed for a violation
    CUT = 4  # killed through no fault of its own


@dataclass(frozen=True, slots=True)
class Ending:
    """A decision to end a worker."""

    how: How
    cause: Cause
    detail: str = ""  # figures or text for people
    stop: Cause = Cause.NONE  # cause of an earlier request to stop; NONE if there was none


class Watcher(Protocol):
    """Checks one condition under which a worker has to end."""

    def look(self) -> Ending | None:
        """Check once, which its seat does a few times a second; None while the worker may go on."""
