"""The uses of one rank's bubble time while filling was on (FreeRide's breakdown, arXiv 2409.06941).

Each nanosecond counts once.  A bubble that no worker has a ``BubbleUse`` of counts as missed by a worker if it lies
between that worker's first and last use, as not known if older uses were dropped, and otherwise as without a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Self

import numpy as np

from megatron.fill.records.tables import column
from megatron.fill.report.seen import Bubbles, uses_of
from megatron.fill.types import Lack, WorkerRecord


class TimeUse(StrEnum):
    """The use of a stretch of a bubble, or the reason why it was not used."""

    heading: str  # of its column on a terminal
    colour: str  # of its bar on the page

    def __new__(cls, value: str, heading: str, colour: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.heading, member.colour = heading, colour
        return member

    STEPS = "steps", "in\nsteps", "#009e73"  # inside steps of jobs
    WAKING = "waking", "wak-\ning", "#0072b2"  # from the opening to the first step
    RUNTIME = "runtime", "run-\ntime", "#56b4e9"  # between steps, in the pause, in a worker that skipped the bubble
    MISSED = "missed", "missed", "#7f9fbf"  # whole bubbles of which a worker that was there has nothing
    HELD = "held", "held", "#c9a227"  # until many bubbles like it would have ended
    LITTLE_TIME = "little_time", "little\ntime", "#e69f00"  # before the predicted end; the next step did not fit
    PAST_PREDICTION = "past_prediction", "past\nend", "#f0b95a"  # after the predicted end, hence no step was begun
    LITTLE_MEMORY = "little_memory", "little\nmemory", "#cc79a7"  # the next step needs more than the bubble has
    NO_JOB = "no_job", "no\njob", "#999999"  # no worker had a step to run
    TOO_SHORT = "too_short", "too\nshort", "#d55e00"  # before a predicted end so near that the gate stayed shut
    NOT_PREDICTED = "not_predicted", "not pre-\ndicted", "#a0522d"  # no prediction, hence the gate stayed shut
    NOT_KNOWN = "not_known", "not\nknown", "#bbbbbb"  # only sums are recorded, or the workers' records are missing


def time_use(bubbles: Bubbles, workers: Sequence[WorkerRecord]) -> dict[TimeUse, int]:
    """Return the nanoseconds of all bubbles with filling on, by use."""
    use = dict.fromkeys(TimeUse, 0)
    single = bubbles.filling & (bubbles.index >= 0)
    shut = single & (bubbles.seq == 0)
    use[TimeUse.NOT_KNOWN] = _sum(bubbles.duration[bubbles.filling & ~single])
    use[TimeUse.NOT_PREDICTED] = _sum(bubbles.duration[shut & (bubbles.predicted == 0)])
    short = shut & (bubbles.predicted > 0)
    foreseen = np.minimum(bubbles.predicted, bubbles.duration)[short]
    use[TimeUse.TOO_SHORT] = _sum(foreseen)
    use[TimeUse.PAST_PREDICTION] = _sum(bubbles.duration[short] - foreseen)
    opened = np.flatnonzero(single & (bubbles.seq > 0))
    opened = opened[np.argsort(bubbles.seq[opened], kind="stable")]
    _add_opened(use, bubbles, opened, _Words(bubbles.seq[opened], bubbles.duration[opened], workers))
    # The harvest in old bubbles is still known, as a sum.
    forgotten = sum(worker.harvested_ns - sum(column(worker.uses, "harvested_ns")) for worker in workers)
    _move(use, TimeUse.NOT_KNOWN, TimeUse.STEPS, max(0, forgotten))
    return use


def time_use_unknown(bubbles: Bubbles) -> dict[TimeUse, int]:
    """Return ``time_use`` of bubbles whose workers' records are missing."""
    use = time_use(bubbles, ())
    _move(use, TimeUse.NO_JOB, TimeUse.NOT_KNOWN, use[TimeUse.NO_JOB])
    return use


class _Words:
    """The workers' uses of bubbles, one array entry for each bubble of ``seq`` (ascending).

    Attributes:
        any: True if a worker has a use of it.
        harvested, held: ns harvested and held by all workers; by each of them at most the bubble's ``duration``.
        latency: ns until the first step of the worker that left the bubble first; 0 if it ran none.
        left, lack: fields of the worker that left the bubble last.
        missed: True if a worker was running and has no use of it.
        forgotten: True if a worker's use of it may have been dropped from its record.
    """

    def __init__(self, seq: np.ndarray, duration: np.ndarray, workers: Sequence[WorkerRecord]) -> None:
        words = uses_of(workers)
        at = np.searchsorted(seq, words["seq"])
        known = np.flatnonzero(np.append(seq, -1)[at] == words["seq"])
        known = known[np.argsort(words["left_ns"][known], kind="stable")]
        at = at[known]
        self.any = np.zeros(len(seq), dtype=bool)
        self.harvested, self.left, self.lack, self.held, self.latency = np.zeros((5, len(seq)), dtype=np.int64)
        self.any[at] = True
        for total, name in ((self.harvested, "harvested_ns"), (self.held, "held_ns")):
            np.add.at(total, at, np.minimum(words[name][known], duration[at]))
        self.latency[at[::-1]] = np.maximum(words["latency_ns"][known[::-1]], 0)
        self.left[at], self.lack[at] = words["left_ns"][known], words["lack"][known]  # the last one of each stays
        there = np.zeros(len(seq) + 1, dtype=np.int64)
        forgotten = 0
        for worker in workers:
            if its := column(worker.uses, "seq"):
                there[np.searchsorted(seq, min(its))] += 1
                there[np.searchsorted(seq, max(its), side="right")] -= 1
                forgotten = max(forgotten, min(its) if worker.older_uses else 0)
        self.missed = (np.cumsum(there[:-1]) > 0) & ~self.any
        self.forgotten = (seq < forgotten) & ~self.any & ~self.missed


def _add_opened(use: dict[TimeUse, int], bubbles: Bubbles, opened: np.ndarray, words: _Words) -> None:
    duration = bubbles.duration[opened]
    harvested = np.minimum(words.harvested, duration)
    taken = np.clip(words.left - bubbles.start[opened], harvested, duration)
    rest = np.where(words.any, duration - taken, 0)
    foreseen = np.clip(bubbles.predicted[opened] - taken, 0, rest)
    short = words.lack == Lack.TIME
    use[TimeUse.STEPS] += _sum(harvested)
    held = np.where(words.any, np.minimum(words.held, taken - harvested), 0)
    waking = np.where(words.any, np.minimum(words.latency, taken - harvested - held), 0)
    use[TimeUse.HELD] += _sum(held)
    use[TimeUse.WAKING] += _sum(waking)
    use[TimeUse.RUNTIME] += _sum((taken - harvested - held - waking)[words.any])
    use[TimeUse.MISSED] += _sum(duration[words.missed])
    use[TimeUse.LITTLE_TIME] += _sum(foreseen[short])
    use[TimeUse.PAST_PREDICTION] += _sum((rest - foreseen)[short])
    use[TimeUse.LITTLE_MEMORY] += _sum(rest[words.lack == Lack.MEMORY])
    use[TimeUse.NO_JOB] += _sum(rest[words.lack == Lack.JOB])
    use[TimeUse.NOT_KNOWN] += _sum(duration[words.forgotten])
    use[TimeUse.NO_JOB] += _sum(duration[~(words.any | words.missed | words.forgotten)])


def _move(use: dict[TimeUse, int], source: TimeUse, target: TimeUse, most_ns: int) -> None:
    moved_ns = min(use[source], most_ns)
    use[source] -= moved_ns
    use[target] += moved_ns


def _sum(durations: np.ndarray) -> int:
    return int(durations.sum())
