"""The event queue: the next event, and the order of simultaneous events."""

from __future__ import annotations

import heapq
from enum import IntEnum
from math import inf
from typing import NamedTuple


class EventKind(IntEnum):
    """Event types, in the order in which simultaneous events are handled; devices look for jobs after all of them.

    So a job that is done at the instant at which its main job stops counts as done.
    """

    JOB_ENDS = 0
    JOB_STARTS = 1  # its first step
    MAIN_ENDS = 2
    MAIN_FAILS = 3
    MAIN_STARTS = 4
    ARRIVAL = 5


class Event(NamedTuple):
    """Events are ordered by time, kind, and the order in which they were announced."""

    time_s: float
    kind: EventKind
    sequence: int
    about: int  # number of the job or of the main job
    token: int  # version of the job's or main job's state; an event with an outdated one is ignored


class Calendar:
    """All future events."""

    def __init__(self) -> None:
        self._heap: list[Event] = []
        self._sequence = 0

    def announce(self, time_s: float, kind: EventKind, about: int, token: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, Event(time_s, kind, self._sequence, about, token))

    @property
    def next_s(self) -> float:
        """Time of the next event; infinity if there is none."""
        return self._heap[0].time_s if self._heap else inf

    def take(self, time_s: float) -> list[Event]:
        """Remove and return all events of this instant; one announced for it later comes with the next call."""
        now = []
        while self._heap and self._heap[0].time_s <= time_s:
            now.append(heapq.heappop(self._heap))
        return now
