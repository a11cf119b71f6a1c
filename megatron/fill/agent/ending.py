"""What a watch over a worker decides: that it ends, how, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class How(IntEnum):
    """How a worker is ended, from mild to harsh: a harsher decision takes the place of a milder one."""

    STOP = 1  # it is asked to save and stop
    LATE = 2  # it was, and did not in time: killed
    FAIL = 3  # killed for what it did
    CUT = 4  # killed through no fault of its own


@dataclass(frozen=True, slots=True)
class Ending:
    """One decision.

    Attributes:
        why: for people.
        stop: why it had been asked to stop before; empty if it had not.
    """

    how: How
    why: str
    stop: str = ""


class Watcher(Protocol):
    """Looks after one thing for which a worker may have to end."""

    def look(self) -> Ending | None:
        """Called a few times a second, always by the thread that watches the worker; None while all is well."""


def harshest(watchers: Iterable[Watcher]) -> Ending | None:
    """What they decide together: every one of them looks, and of two that are as harsh the first one counts."""
    found = [ending for watcher in watchers if (ending := watcher.look()) is not None]
    return max(found, key=lambda ending: ending.how, default=None)
