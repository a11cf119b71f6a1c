"""Trainings that take turns on one machine: one is held while another goes on.

A shared machine is faster in one minute than in the next.  What two trainings take in turns can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import pi, sqrt
from pathlib import Path
from statistics import median, stdev

from megatron.fill.records import last_segment
from megatron.fill.types import RankRecord
from scripts.benchmarks.forked import ForkedRanks

WARMUP = 3  # iterations of each training that nobody counts
_ENDLESS_S = 300.0


@dataclass(frozen=True, slots=True)
class Turn:
    """When one of the trainings ran alone; ns of CLOCK_MONOTONIC."""

    start_ns: int
    end_ns: int


class Training:
    """One that goes on until it is told to end, and is held between its turns.

    Args:
        program: as of ``ForkedRanks``; with ``--exit-signal-handler``, and its records in ``folder / "run"``.
        core: as of ``ForkedRanks``.

    Attributes:
        turns: those that count.
    """

    def __init__(self, folder: Path, program: Sequence[str], ranks: int, core: int = 0) -> None:
        self.folder = folder
        self.turns: list[Turn] = []
        folder.mkdir()
        self._ranks = ForkedRanks(program, folder / "log", ranks, core=core)
        try:
            self._ranks.wait_for(f" iteration {WARMUP:8}/", _ENDLESS_S)
            begun_s = time.monotonic()
            self._ranks.wait_for(f" iteration {WARMUP + 2:8}/", _ENDLESS_S)
        except BaseException:
            self._ranks.kill()
            raise
        self.about_s = (time.monotonic() - begun_s) / 2
        self._ranks.hold()

    def turn(self, iterations: int, counts: bool = True, beside: Sequence[Training] = ()) -> Turn:
        """Let it run for about so many iterations, and then hold it.

        Args:
            counts: whether its iterations are among its own (``periods_s``).
            beside: others that run meanwhile.
        """
        start_ns = time.monotonic_ns()
        for one in (self, *beside):
            one._ranks.let_go()
        time.sleep(self.about_s * (iterations + 0.5))
        end_ns = time.monotonic_ns()
        for one in (self, *beside):
            one._ranks.hold()
        turn = Turn(start_ns, end_ns)
        if counts:
            self.turns.append(turn)
        return turn

    def end(self) -> None:
        """Well, with its records written."""
        self._ranks.ask_to_end()
        self._ranks.wait(_ENDLESS_S)

    def kill(self) -> None:
        self._ranks.kill()

    def records(self) -> list[RankRecord]:
        return list(last_segment(self.folder / "run").records())

    def periods_s(self) -> list[list[float]]:
        """From one iteration's start to the next one's, in each of its turns."""
        first = next(last_segment(self.folder / "run").records())
        return periods_s([one.start_ns for one in first.iterations], self.turns)

    def period_s(self) -> tuple[float, float]:
        """The median over turns, and its standard error: from how they differ, as each is of another minute."""
        each = [median(turn) for turn in self.periods_s()]
        return median(each), median_error(each)


def median_error(values: Sequence[float]) -> float:
    """The standard error of the median of two or more values that are about normal."""
    return sqrt(pi / 2) * stdev(values) / sqrt(len(values))


def periods_s(starts_ns: Sequence[int], turns: Sequence[Turn]) -> list[list[float]]:
    """From start to start of the iterations that were whole inside of a turn, but for the first of each.

    A turn without one is left out: in a slow minute turns have fewer iterations.

    Raises:
        RuntimeError: fewer than two turns are left.
    """
    found = []
    for turn in turns:
        inside = [start for start in starts_ns if turn.start_ns <= start <= turn.end_ns]
        found.append([(after - before) / 1e9 for before, after in pairwise(inside[1:])])
    whole = [one for one in found if one]
    if len(whole) < 2:
        raise RuntimeError(
            f"{len(whole)} turns of {len(turns)} had three iterations; expected more turns, or longer ones"
        )
    return whole
