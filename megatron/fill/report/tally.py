"""Sums over parts of a run (one rank, one stage, all ranks), in bounded memory for any number of parts."""

from __future__ import annotations

from collections import Counter

import numpy as np

from megatron.fill.report.part import Figures, JobWork, RankPart
from megatron.fill.report.schema import Outside, PairedTimes, Percentiles, Times, Totals, WorkReport
from megatron.fill.report.seen import IterationTimes
from megatron.fill.report.timeuse import TimeUse
from megatron.fill.types import PIPELINE_KINDS, BubbleKind, Iteration

_S, _MS, _US = 1e9, 1e6, 1e3  # nanoseconds
_POOLED = 1_000_000
_ITERATION = np.dtype([("duration", "i8"), ("ranks", "i8"), ("block", "i8"), ("filling", "?"), ("watched", "?")])


class Pool:
    """The distribution of many values: count, mean and maximum are exact.

    Above ``_POOLED`` values, the percentiles are those of a random sample of about half as many or more.
    """

    def __init__(self) -> None:
        self.count = self.total = self.largest = self._held = 0
        self._kept: list[np.ndarray] = []
        self._share = 1.0
        self._random = np.random.default_rng(0)

    def add(self, values: np.ndarray) -> None:
        if not len(values):
            return
        self.count += len(values)
        self.total += int(values.sum())
        self.largest = max(self.largest, int(values.max()))
        if self._share < 1:
            values = self._sample(values, self._share)
        self._kept.append(values)
        self._held += len(values)
        while self._held > _POOLED:
            self._share /= 2
            self._kept = [self._sample(np.concatenate(self._kept), 0.5)]
            self._held = len(self._kept[0])

    def _sample(self, values: np.ndarray, share: float) -> np.ndarray:
        return values[self._random.random(len(values)) < share]

    def times(self) -> Times | None:
        if not self.count:
            return None
        p50_s, p99_s = np.percentile(np.concatenate(self._kept), (50, 99)) / _S
        return Times(count=self.count, mean_s=self.total / self.count / _S, median_s=p50_s, p99_s=p99_s)

    def microseconds(self) -> Percentiles | None:
        if not self.count:
            return None
        p50, p99 = np.percentile(np.concatenate(self._kept), (50, 99)) / _US
        return Percentiles(count=self.count, p50=p50, p99=p99, max=self.largest / _US)


class Tally:
    """Adds up parts."""

    def __init__(self) -> None:
        self._iterations = Counter[int]()  # by rank
        self._watched = 0  # ns of the iterations whose bubbles were observed
        self._figures = Figures()
        self._times, self._on, self._off = Pool(), Pool(), Pool()
        self._latencies, self._overruns = Pool(), Pool()
        self.done: dict[str, JobWork] = {}  # by job

    def add(self, part: RankPart) -> None:
        its = part.iterations
        self._iterations[part.info.rank] += len(its.number)
        self._figures += part.figures
        self._times.add(its.duration)
        self._watched += int(its.duration[its.watched].sum())
        paired = (its.block >= 0) & its.watched
        self._on.add(its.duration[paired & its.filling])
        self._off.add(its.duration[paired & ~its.filling])
        self._latencies.add(part.latencies)
        self._overruns.add(part.overruns)
        for job, done in part.done:
            self.done[job] = self.done.get(job, JobWork()) + done

    def totals(self) -> Totals:
        """Return the totals, with the units of work still empty."""
        its = self._figures
        paired = PairedTimes(on=self._on.times(), off=self._off.times())
        return Totals(
            iterations=max(self._iterations.values(), default=0),
            iteration_s=self._times.total / _S,
            iteration_time=self._times.times(),
            bubble_s=_seconds(its.bubbles),
            bubble_share=ratio(its.bubbles.total(), self._watched),
            evaluation_bubble_s=_seconds(its.evaluation),
            fillable_s=its.fillable / _S,
            settling_s=its.settling / _S,
            harvested_s=None if its.unknown and not its.known else its.known_harvested / _S,
            harvest_ratio=ratio(its.known_harvested, its.known),
            outside={
                kind: Outside(
                    total_s=its.outside[kind] / _S,
                    fillable_s=its.outside_fillable[kind] / _S,
                    harvested_s=its.outside_harvested[kind] / _S,
                )
                for kind in BubbleKind
                if its.outside[kind]
            },
            fill_efficiency=ratio(its.alone, its.share),
            time_use_ns={use: its.time_use[use] for use in TimeUse},
            steps=sum(done.steps for done in self.done.values()),
            work=[
                WorkReport(job=job, work_done=done.work, unit="", steps=done.steps, harvested_s=done.harvested_ns / _S)
                for job, done in self.done.items()
            ],
            open_to_step_us=self._latencies.microseconds(),
            overrun_us=self._overruns.microseconds(),
            paired=paired if paired.on or paired.off else None,
            predicted_bubbles=its.predicted,
            prediction_error_ms=its.errors / its.predicted / _MS if its.predicted else None,
        )


class MeanIterations:
    """The training's iterations in one segment: durations are means over the ranks, whose clocks need not agree."""

    def __init__(self) -> None:
        self._first = 0  # number of the first iteration in the array
        self._sums = np.zeros(0, _ITERATION)
        self._ranks = 0

    def add(self, its: IterationTimes) -> None:
        if not len(its.number):
            return
        self._ranks += 1
        self._cover(int(its.number.min()), int(its.number.max()))
        sums, at = self._sums, its.number - self._first
        fresh = sums["ranks"][at] == 0
        new = at[fresh]
        sums["block"][new], sums["filling"][new], sums["watched"][new] = its.block[fresh], its.filling[fresh], True
        sums["watched"][at] &= its.watched
        # An iteration counts for the comparison only if all ranks were in a block: one may settle later than another.
        sums["block"][at] = np.minimum(sums["block"][at], its.block)
        sums["duration"][at] += its.duration
        sums["ranks"][at] += 1

    def _cover(self, first: int, last: int) -> None:
        if not len(self._sums):
            self._first = first
        before, after = max(0, self._first - first), max(0, last - self._first + 1 - len(self._sums))
        if before or after:
            self._first -= before
            self._sums = np.concatenate([np.zeros(before, _ITERATION), self._sums, np.zeros(after, _ITERATION)])

    def iterations(self, blocks_before: int) -> list[Iteration]:
        """Return the iterations in paired blocks that all ranks recorded, their blocks offset by ``blocks_before``."""
        whole = np.flatnonzero((self._sums["ranks"] == self._ranks) & (self._sums["block"] >= 0))
        rows = zip((self._first + whole).tolist(), self._sums[whole].tolist(), strict=True)
        return [
            Iteration(number, 0, round(duration / ranks), filling, block + blocks_before, watched)
            for number, (duration, ranks, block, filling, watched) in rows
        ]


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _seconds(by_kind: Counter[BubbleKind]) -> dict[BubbleKind, float]:
    return {kind: by_kind[kind] / _S for kind in PIPELINE_KINDS}
