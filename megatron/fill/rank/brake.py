"""The automatic brake: stops filling when it measurably slows the training down, and tries again later.

``--fill-max-slowdown`` is the limit.  One iteration in each period is left unfilled (a *probe*), to compare its filled
neighbours with.  Where successive iterations vary together, a second one in a row would tell little more than the
first.  Megatron's iteration number alone determines which ones, and longer periods are multiples of the shorter ones,
so all ranks leave the same iterations unfilled without communication.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from megatron.fill.rank.evidence import Evidence, Noise
from megatron.fill.types import BrakeEvent, fills_block

_BESIDE = 3  # number of filled iterations before a probe, and after it, that it is compared with
_PERIODS = (4, 8, 16, 32, 64)  # iterations from one probe to the next: each a multiple of the one before
_UNSETTLED = 1  # the index of the period before the jobs have settled: probes tell little then
_CALM_PAIRS = 5  # number of pairs after which the probes become rarer
_FORGIVING_PAIRS = 20  # number of pairs in a row without braking after which one strike is removed
_CLEARED = -2.0  # standard deviations to the limit, over all pairs since jobs settled: below, they do so at once
_DOUBTED = 1.25  # standard deviations above the limit, over some latest pairs, from which probes become frequent again
_EDGE = 4  # number of iterations before and after the end of a stop that are a pair
_GRID = 16  # stops end at multiples of it
_COOL_DOWN = 64  # iterations without filling after braking; doubles with every strike
_MOST_STRIKES = 5  # so at most 1024 iterations
_GUARD_SHARE = 1 / 400  # guard that the first strike adds, as a share of an iteration; doubles with every strike
_LEAST_GUARD_NS = 500_000


@dataclass(eq=False, repr=False)
class Brake:
    """Decides for each iteration of one rank whether it is filled, and measures the slowdown by filling."""

    limit: float  # the accepted slowdown as a fraction (0.01 is 1%)
    rank: int
    guard_ns: int = 0  # time to keep free at the end of every predicted bubble, which grows with every strike
    paired_blocks: int = 0  # length of alternating blocks, which are then used as pairs; 0 for probes
    say: Callable[[str], None] = lambda text: print(text, flush=True)  # prints a line for the operator

    def __post_init__(self) -> None:
        self.events: list[BrakeEvent] = []  # all occasions on which it stopped the filling
        self._first_guard_ns = self.guard_ns
        self._guard_step_ns = 0
        self._evidence = Evidence(self.limit)
        self._noise = Noise()
        self._level = _UNSETTLED
        self._settled = False
        self._calm = 0  # pairs since the probes became rarer, or since the slowdown last seemed to be over the limit
        self._good = 0  # pairs since the latest stop, or since a strike was last removed
        self._strikes = 0
        self._until = 0  # the iteration that fills again; 0 while the brake is off
        self._retried = 0  # the latest such iteration
        self._pair: tuple[int, int] | None = None  # the pair that the present iteration belongs to, by its period
        self._filling = False
        self._last_ns = 0
        self._times: dict[bool, list[float]] = {True: [], False: []}  # logarithms of that pair's times, by filling
        self._before: deque[float] = deque(maxlen=_BESIDE)  # those of the latest filled iterations

    def iteration_started(self, iteration: int, number: int) -> bool:
        """Close the pair before, stop filling if it was too slow, and return True if this iteration is to be filled.

        Args:
            iteration: Megatron's number of the iteration.
            number: number counted from the first iteration that can be filled, which begins the first paired block.
        """
        pair = self._pair_of(iteration, number)
        if pair != self._pair:
            measured = self._close_pair()
            if measured is not None:
                self._stop(*measured, iteration, number)
            pair = self._pair_of(iteration, number)  # again, since the period of probes may have changed
            self._pair = pair
            if pair is not None and pair[0]:
                self._times[True] = [*self._before]
        if self._until and iteration >= self._until:
            self._retried, self._until = self._until, 0
            guard = f"{self.guard_ns / 1e6:.1f} ms"
            self.say(f"PipeFill: rank {self.rank} fills again from iteration {iteration}, with a guard of {guard}")
        self._filling = not self._until and self._plan(iteration, number)
        return self._filling

    def jobs_settled(self) -> None:
        """Begin again with frequent probes: the pairs so far had little or nothing filled in them."""
        self._settled = True
        self._level = self._calm = 0
        self._evidence.clear()

    @property
    def on(self) -> bool:
        """True while filling is stopped because of a slowdown; False in probes and unfilled blocks."""
        return bool(self._until)

    def observe(self, duration_ns: int, disturbed: bool) -> None:
        """Record the duration of an iteration; a disturbed one (after an evaluation, or paused) is ignored."""
        if disturbed:
            return
        self._last_ns = duration_ns
        log_time = math.log(max(1, duration_ns))
        self._noise.add(self._filling, log_time)
        if self._filling:
            self._before.append(log_time)
        if self._pair is not None:
            self._times[self._filling].append(log_time)

    def _plan(self, iteration: int, number: int) -> bool:
        if self.paired_blocks:
            return fills_block(number // self.paired_blocks)
        return (iteration + 1) % _PERIODS[self._level] != 0

    def _pair_of(self, iteration: int, number: int) -> tuple[int, int] | None:
        """Return the key of the pair that an iteration belongs to, if any.

        A pair is a probe with what follows it, two paired blocks, or the end of a cool-down with what follows it.
        """
        if self.paired_blocks:
            return None if self._until > iteration else (0, number // (2 * self.paired_blocks))
        begun = self._until or self._retried
        if begun and begun - _EDGE <= iteration < begun + _EDGE:
            return 0, begun
        period = _PERIODS[self._level]
        inside = not self._until and (iteration + 1) % period <= _BESIDE
        return (period, (iteration + 1) // period) if inside else None

    def _close_pair(self) -> tuple[float, int] | None:
        """Add the pair that is over to the evidence, and return its verdict (``Evidence.verdict``)."""
        on, off = self._times[True], self._times[False]
        self._times = {True: [], False: []}
        sigma = self._noise.sigma
        if 2 * min(len(on), len(off)) < max(1, self.paired_blocks) or sigma is None:
            return None
        self._evidence.add(on, off, sigma)
        measured = self._evidence.verdict(sigma)
        if measured is None:
            self._relax(sigma)
        return measured

    def _relax(self, sigma: float) -> None:
        """Adapt the period of probes after a pair within the limit, and remove a strike after enough of them."""
        suspicion = self._evidence.suspicion(sigma)
        self._calm = self._calm + 1 if suspicion < 0 else 0
        if self._evidence.doubt(sigma) > _DOUBTED:
            self._level = 0
        elif self._calm >= _CALM_PAIRS or (self._settled and suspicion < _CLEARED):
            self._calm, self._level = 0, min(self._level + 1, len(_PERIODS) - 1)
        self._good += 1
        if self._good >= _FORGIVING_PAIRS and self._strikes:
            self._good = 0
            self._strike(-1)

    def _stop(self, slowdown: float, pairs: int, iteration: int, number: int) -> None:
        if not self._strikes:
            self._guard_step_ns = max(_LEAST_GUARD_NS, int(self._last_ns * _GUARD_SHARE))
        self._strike(+1)
        self._level = self._calm = self._good = 0
        self._evidence.clear()
        self._before.clear()
        self._until = iteration + (_COOL_DOWN << (self._strikes - 1))
        # Ranks that stop within the same period resume together, and blocks resume with a filled one.
        grid, offset = (2 * self.paired_blocks, iteration - number) if self.paired_blocks else (_GRID, 0)
        self._until += (offset - self._until) % grid
        event = BrakeEvent(iteration - 1, slowdown, pairs, self._until, self.guard_ns)
        self.events.append(event)
        limit = f"--fill-max-slowdown {100 * self.limit:g}%"
        self.say(
            f"PipeFill: rank {self.rank} stops filling: the training is {event.slowdown:.1%} slower (over "
            f"{event.pairs} pairs, more than {limit}); tries again at iteration {event.until} with a guard of "
            f"{event.guard_ns / 1e6:.1f} ms"
        )

    def _strike(self, change: int) -> None:
        self._strikes = min(self._strikes + change, _MOST_STRIKES)
        more_ns = self._guard_step_ns << (self._strikes - 1) if self._strikes else 0
        self.guard_ns = self._first_guard_ns + more_ns
