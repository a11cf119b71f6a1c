"""The event queue: what happens next, and in which order what happens at one instant."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from enum import IntEnum
from math import inf
from typing import NamedTuple


class EventKind(IntEnum):
    """Of events; those of one instant are handled in this order, and devices look for jobs after all of them.

    A job that is done at the instant at which its main job stops is done.
    """

    JOB_ENDS = 0
    JOB_STARTS = 1  # its first step
    MAIN_ENDS = 2
    MAIN_FAILS = 3
    MAIN_STARTS = 4
    ARRIVAL = 5


class Event(NamedTuple):
    """Events are ordered by time, kind, and the order in which they were announced.

    Attributes:
        about: the number of the job or of the main job.
        token: tells an announcement that still holds from one that was overtaken.
    """

    time_s: float
    kind: EventKind
    sequence: int
    about: int
    token: int


class Calendar:
    """All events to come.

    Args:
        arrivals_s: when jobs arrive, in order; job ``n`` of this order is what the event is about.
    """

    def __init__(self, arrivals_s: Sequence[float]) -> None:
        self._arrivals_s = arrivals_s
        self._arrived = 0
        self._heap: list[Event] = []
        self._sequence = 0

    def announce(self, time_s: float, kind: EventKind, about: int, token: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, Event(time_s, kind, self._sequence, about, token))

    @property
    def next_s(self) -> float:
        """When something happens next; infinity for never."""
        arrival_s = self._arrivals_s[self._arrived] if self._arrived < len(self._arrivals_s) else inf
        return min(arrival_s, self._heap[0].time_s) if self._heap else arrival_s

    def take(self, time_s: float) -> Iterator[Event]:
        """All that happens at this instant; what is announced for it meanwhile comes at the next call."""
        now = []
        while self._heap and self._heap[0].time_s <= time_s:
            now.append(heapq.heappop(self._heap))
        yield from now
        while self._arrived < len(self._arrivals_s) and self._arrivals_s[self._arrived] <= time_s:
            self._arrived += 1
            yield Event(time_s, EventKind.ARRIVAL, 0, self._arrived - 1, 0)
