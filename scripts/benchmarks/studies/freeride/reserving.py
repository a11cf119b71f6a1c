"""FreeRide's way to fill a bubble, as in its artifact: reservation and polling.

A manager polls every 10 ms for bubbles that have begun and sends the stage's side task the predicted end, which comes
from a profile of one iteration (scheduler_v1.py).  The task polls every 5 ms whether it was started, every 10 ms if it
is a C++ program, and sleeps as long after every step.  A step begins if more time is left of the bubble than is
reserved for it: the profiled median, rounded up to 10 ms, times 1.2 (run_side_task.py; task_v2.py, task.h).

Calls between processes are assumed to take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from megatron.fill.types import BubbleUse
from scripts.benchmarks.studies.truth.replay import PlayedIteration
from scripts.benchmarks.studies.truth.steps import StepTimes
from scripts.benchmarks.studies.truth.virtual import Replayed

_MS = 1_000_000
MANAGER_NS = 10 * _MS


@dataclass(frozen=True, slots=True)
class TaskLoop:
    """A side task's loop.

    Attributes:
        sleep_ns: interval at which it polls its state, and so the time between two steps.
        sleeps_first: True if it also sleeps between its start and its first step.
    """

    sleep_ns: int
    sleeps_first: bool

    def wakes_ns(self, random: np.random.Generator, count: int) -> tuple[int, ...]:
        """Draw ``count`` delays from a bubble's beginning to the first step: a poll comes at any time in its period."""
        noticed = random.uniform(0, MANAGER_NS, count) + random.uniform(0, self.sleep_ns, count)
        return tuple(int(ns) + self.sleeps_first * self.sleep_ns for ns in noticed)


PYTHON = TaskLoop(5 * _MS, sleeps_first=False)
COMPILED = TaskLoop(10 * _MS, sleeps_first=True)


def reserved_ns(median_ns: int) -> int:
    """Time that must be left of a bubble for a step to begin."""
    return -(-median_ns // (10 * _MS)) * 12 * _MS


def fill_reserved(
    iterations: Sequence[PlayedIteration], lengths_ns: Sequence[int], times: StepTimes, reserve_ns: int
) -> Replayed:
    """Run a side task's steps in one rank's bubbles.  A step runs to its end, and the rank waits for it.

    Args:
        lengths_ns: profiled durations of an iteration's bubbles, in order.
        times: step times; the task sleeps ``gap_ns`` after every step.
    """
    done = Replayed()
    steps_ns, wakes_ns = cycle(times.steps_ns), cycle(times.wakes_ns)
    now_ns = seq = 0
    for played in iterations:
        for (_, begin_ns, end_ns), length_ns in zip(played.waits, lengths_ns, strict=True):
            seq += 1
            start_ns = played.start_ns + begin_ns
            now_ns = first_ns = max(now_ns, start_ns + next(wakes_ns))
            last_ns = spent_ns = steps = 0
            while start_ns + length_ns - now_ns > reserve_ns:
                step_ns = next(steps_ns)
                last_ns = now_ns + step_ns
                now_ns = last_ns + times.gap_ns
                spent_ns += step_ns
                steps += 1
            if steps:
                overrun_ns = max(0, last_ns - played.start_ns - end_ns)
                done.uses.append(BubbleUse(seq, first_ns - start_ns, spent_ns - overrun_ns, overrun_ns, steps))
                done.work_done += steps * times.work
    return done
