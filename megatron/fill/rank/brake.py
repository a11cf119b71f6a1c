"""The automatic brake: filling stops when the training is measurably slower for it, and is tried again later.

``--fill-max-slowdown`` is the limit.  Every so many iterations a few are left unfilled, to compare their filled
neighbours with.  Which ones follows from Megatron's iteration number alone, so all ranks leave out the same ones
without talking about it: the rarer probes are at iterations at which the more frequent ones are, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron.fill.rank.evidence import Evidence, MeasuredSlowdown, Noise
from megatron.fill.types import BrakeEvent, fills_block

_PROBE = 4  # iterations without filling in a row; as many before and after them are compared with them
_PERIODS = (16, 32, 64, 128)  # iterations from one probe to the next: each a multiple of the one before
_CALM_PAIRS = 4  # until the probes become rarer
_FORGIVING_PAIRS = 16  # in a row without a brake, until one brake is forgotten
_DISTRUSTED = 1.5  # deviations above the limit, over all pairs: the probes become frequent again
_SURPRISING = 3.0  # the same, in the latest pair
_COOL_DOWN = 64  # iterations; doubles with every brake that is not forgotten
_MOST_STRIKES = 5  # so at most 1024 iterations
_GUARD_SHARE = 1 / 400  # of an iteration: the guard that the first brake adds; it doubles, too
_LEAST_GUARD_NS = 500_000


class Brake:
    """Says for each iteration of one rank whether to fill it, and measures what that does.

    Args:
        limit: the slowdown that is accepted: 0.01 is 1%.
        rank: for the messages.
        guard_ns: what is kept free at the end of every predicted bubble before the first brake.
        paired_blocks: the length of the blocks that alternate anyway, which are then the pairs; 0 for probes.
        say: is told what the operator should know, a line each.

    Attributes:
        guard_ns: what to keep free at the end of every predicted bubble now.
        events: each time that it braked.
    """

    def __init__(
        self,
        limit: float,
        rank: int,
        guard_ns: int = 0,
        paired_blocks: int = 0,
        say: Callable[[str], None] = lambda text: print(text, flush=True),
    ) -> None:
        self.limit = limit
        self.rank = rank
        self.guard_ns = guard_ns
        self.paired_blocks = paired_blocks
        self.say = say
        self.events: list[BrakeEvent] = []
        self._first_guard_ns = guard_ns
        self._guard_step_ns = 0
        self._evidence = Evidence(limit)
        self._noise = Noise()
        self._level = 0
        self._calm = 0  # pairs since the probes became rarer, or since the slowdown last seemed to be over the limit
        self._good = 0  # pairs since the last brake, or since the last one that was forgotten
        self._strikes = 0
        self._until = 0  # the iteration that fills again; 0 while the brake is off
        self._retried = 0  # the last such iteration
        self._pair: tuple[int, int] | None = None  # which pair the present iteration belongs to
        self._filling = False
        self._last_ns = 0
        self._times: dict[bool, list[float]] = {True: [], False: []}  # of that pair, as logarithms

    def fills(self, iteration: int, number: int) -> bool:
        """Whether to fill the iteration that begins.

        Args:
            iteration: as Megatron counts.
            number: from 0 for the first that can be filled, which begins the first of the paired blocks.
        """
        pair = self._pair_of(iteration, number)
        if pair != self._pair:
            measured = self._close_pair()
            if measured is not None:
                self._stop(measured, iteration, number)
            pair = self._pair_of(iteration, number)  # among probes that may have become rarer
            self._pair = pair
        if self._until and iteration >= self._until:
            self._retried, self._until = self._until, 0
            guard = f"{self.guard_ns / 1e6:.1f} ms"
            self.say(f"PipeFill: rank {self.rank} fills again from iteration {iteration}, with a guard of {guard}")
        self._filling = not self._until and self._plan(iteration, number)
        return self._filling

    @property
    def on(self) -> bool:
        """Whether nothing is filled since that was too slow; probes and paired blocks are something else."""
        return bool(self._until)

    def observe(self, duration_ns: int, disturbed: bool) -> None:
        """The iteration took so long.  A disturbed one (after an evaluation, or paused) tells nothing."""
        if disturbed:
            return
        self._last_ns = duration_ns
        log_time = math.log(max(1, duration_ns))
        self._noise.add(self._filling, log_time)
        if self._pair is not None:
            self._times[self._filling].append(log_time)

    def _plan(self, iteration: int, number: int) -> bool:
        if self.paired_blocks:
            return fills_block(number // self.paired_blocks)
        period = _PERIODS[self._level]
        return not period - 2 * _PROBE <= iteration % period < period - _PROBE

    def _pair_of(self, iteration: int, number: int) -> tuple[int, int] | None:
        """The pair that an iteration belongs to, if any: where it is on, off and on again, or a pair of blocks, or the
        end of a cool-down and what comes after it."""
        if self.paired_blocks:
            return None if self._until > iteration else (0, number // (2 * self.paired_blocks))
        begun = self._until or self._retried
        if begun and begun - _PROBE <= iteration < begun + _PROBE:
            return 0, begun
        period = _PERIODS[self._level]
        inside = not self._until and iteration % period >= period - 3 * _PROBE
        return (period, iteration // period) if inside else None

    def _close_pair(self) -> MeasuredSlowdown | None:
        """Judge by the pair that is over now."""
        on, off = self._times[True], self._times[False]
        self._times = {True: [], False: []}
        sigma = self._noise.sigma
        if 2 * min(len(on), len(off)) < (self.paired_blocks or _PROBE) or sigma is None:
            return None
        self._evidence.add(on, off)
        measured = self._evidence.verdict(sigma)
        if measured is None:
            self._relax(sigma)
        return measured

    def _relax(self, sigma: float) -> None:
        """All may be well: probe less often, and forget a brake when it was long ago."""
        suspicion = self._evidence.suspicion(sigma)
        self._calm = self._calm + 1 if suspicion < 0 else 0
        if suspicion > _DISTRUSTED or self._evidence.surprise(sigma) > _SURPRISING:
            self._level = 0
        elif self._calm >= _CALM_PAIRS:
            self._calm, self._level = 0, min(self._level + 1, len(_PERIODS) - 1)
        self._good += 1
        if self._good >= _FORGIVING_PAIRS and self._strikes:
            self._good = 0
            self._strike(-1)

    def _stop(self, measured: MeasuredSlowdown, iteration: int, number: int) -> None:
        if not self._strikes:
            self._guard_step_ns = max(_LEAST_GUARD_NS, int(self._last_ns * _GUARD_SHARE))
        self._strike(+1)
        self._level = self._calm = self._good = 0
        self._evidence.clear()
        self._until = iteration + (_COOL_DOWN << (self._strikes - 1))
        # Ranks that brake within the same period fill again together, and the blocks begin with one that fills.
        grid, offset = (2 * self.paired_blocks, iteration - number) if self.paired_blocks else (_PERIODS[0], 0)
        self._until += (offset - self._until) % grid
        event = BrakeEvent(iteration - 1, measured.slowdown, measured.pairs, self._until, self.guard_ns)
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
