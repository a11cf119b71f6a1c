"""Series over a run's iterations for its page: harvest, iteration times, predictions, and the parts of an iteration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.fill.records.slowdown import Estimate, slowdown
from megatron.fill.records.tables import column
from megatron.fill.report.seen import seen
from megatron.fill.types import PIPELINE_KINDS, Iteration, JobRecord, RankRecord, WorkerRecord

type Attempt = tuple[JobRecord, WorkerRecord]

_BINS = 250  # points of a line
_DECADES, _CELLS = (-2, 5), 24  # of predictions: from 0.01 ms to 100 s, with as many cells for each power of ten
_MS = 1e6


@dataclass(frozen=True, slots=True)
class Bin:
    """A stretch of iterations, of all ranks and segments; None where there is nothing to say."""

    iteration: int  # the number of its first iteration
    harvest: float | None  # harvested time over fillable time
    filled_ms: float | None  # mean duration of its iterations with filling
    unfilled_ms: float | None


class Series:
    """Sums over the records of ranks, for a run with the iterations ``first`` to ``last``."""

    def __init__(self, first: int, last: int) -> None:
        self._first = first
        self._size = max(1, -(-(last - first + 1) // _BINS))
        count = (last - first) // self._size + 1
        self._fillable, self._harvested = np.zeros(count), np.zeros(count)
        self._times = {filling: (np.zeros(count), np.zeros(count)) for filling in (True, False)}
        side = (_DECADES[1] - _DECADES[0]) * _CELLS
        self._predicted = np.zeros((side, side), dtype=np.int64)
        self._rank: int | None = None  # the first rank, of whose iterations the slowdown is estimated
        self._iterations: list[Iteration] = []
        self._parts: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._whole: defaultdict[int, int] = defaultdict(int)  # iterations with all their passes, by stage

    def add(self, record: RankRecord, attempts: Sequence[Attempt]) -> None:
        """Add a rank's records of one segment."""
        saw = seen(record)
        its, bubbles = saw.iterations, saw.bubbles
        for filling, (total, count) in self._times.items():
            those = its.filling == filling
            np.add.at(total, self._bins(its.number[those]), its.duration[those] / _MS)
            np.add.at(count, self._bins(its.number[those]), 1)
        single = np.flatnonzero(bubbles.filling & (bubbles.index >= 0))
        single = single[np.argsort(bubbles.start[single], kind="stable")]
        where, duration = self._bins(bubbles.iteration[single]), bubbles.duration[single]
        np.add.at(self._fillable, where, duration)
        for attempt in attempts:
            self._harvested += self._harvest(attempt, where, bubbles.seq[single], bubbles.start[single], duration)
        told = np.flatnonzero((bubbles.predicted > 0) & (bubbles.index >= 0) & ~bubbles.forward_only & ~bubbles.outside)
        np.add.at(self._predicted, (_cell(bubbles.predicted[told]), _cell(bubbles.duration[told])), 1)
        self._add_parts(record)
        if self._rank in (None, record.info.rank):
            self._rank = record.info.rank
            self._iterations += record.iterations

    @property
    def slowdown(self) -> Estimate | None:
        """The slowdown by the brake's probes, for a run without paired blocks; None if there are too few."""
        return slowdown(self._iterations)

    def _bins(self, iterations: np.ndarray) -> np.ndarray:
        return np.clip((iterations - self._first) // self._size, 0, len(self._fillable) - 1)

    def _harvest(
        self, attempt: Attempt, where: np.ndarray, seqs: np.ndarray, starts: np.ndarray, durations: np.ndarray
    ) -> np.ndarray:
        """Return the harvest of an attempt by bin.

        The part in older bubbles, of which only the sum is recorded, is spread evenly over those since its start.
        """
        job, worker = attempt
        found = np.zeros(len(self._harvested))
        opened = np.flatnonzero(seqs > 0)
        order = opened[np.argsort(seqs[opened], kind="stable")]
        said = np.array(column(worker.uses, "seq"), dtype=np.int64)
        harvested = np.array(column(worker.uses, "harvested_ns"), dtype=np.int64)
        at = np.searchsorted(seqs[order], said)
        known = np.append(seqs[order], -1)[at] == said
        at = order[at[known]]
        np.add.at(found, where[at], np.minimum(harvested[known], durations[at]))
        rest = worker.harvested_ns - int(harvested.sum())
        before = starts < (starts[at].min() if len(at) else np.inf)
        older = np.flatnonzero((starts >= job.started_ns) & before & (seqs > 0))
        if rest > 0 and len(older):
            np.add.at(found, where[older], rest * durations[older] / max(1, durations[older].sum()))
        return found

    def _add_parts(self, record: RankRecord) -> None:
        """Add up the parts of those iterations of which the passes are recorded."""
        numbers = set(column(record.spans, "iteration"))
        whole = {one.iteration: one.duration_ns for one in record.iterations if one.iteration in numbers}
        parts, stage = self._parts[record.info.stage], record.info.stage
        total = 0
        for span in record.spans:
            if span.iteration in whole:
                parts[span.name] += span.end_ns - span.start_ns
                total += span.end_ns - span.start_ns
        for bubble in record.bubbles:
            if bubble.iteration in whole and bubble.kind in PIPELINE_KINDS and not bubble.forward_only:
                parts[f"{bubble.kind} bubble"] += bubble.duration_ns
                total += bubble.duration_ns
        parts["rest"] += max(0, sum(whole.values()) - total)
        self._whole[stage] += len(whole)

    def bins(self) -> list[Bin]:
        """Return the stretches of iterations, in order."""
        sums = ((self._harvested, self._fillable), self._times[True], self._times[False])
        columns = ([float(part / whole) if whole else None for part, whole in zip(*its, strict=True)] for its in sums)
        return [Bin(self._first + at * self._size, *its) for at, its in enumerate(zip(*columns, strict=True))]

    def parts(self) -> list[tuple[int, str, float]]:
        """Return stage, part and its milliseconds of a mean iteration."""
        names = ["forward", "backward", *(f"{kind} bubble" for kind in PIPELINE_KINDS), "rest"]
        stages = [(stage, its, self._whole[stage]) for stage, its in sorted(self._parts.items()) if self._whole[stage]]
        return [(stage, name, its[name] / count / _MS) for stage, its, count in stages for name in names if its[name]]

    def predictions(self) -> list[tuple[float, float, float, float, int]]:
        """Return the edges in ms of each cell (predicted from, to, measured from, to), and its bubbles."""
        edges = (10.0 ** (_DECADES[0] + np.arange(len(self._predicted) + 1) / _CELLS)).tolist()
        cells = ((x, y, int(self._predicted[x, y])) for x, y in np.argwhere(self._predicted))
        return [(edges[x], edges[x + 1], edges[y], edges[y + 1], count) for x, y, count in cells]


def _cell(durations_ns: np.ndarray) -> np.ndarray:
    ms = np.log10(np.maximum(durations_ns, 1) / _MS)
    return np.clip(((ms - _DECADES[0]) * _CELLS).astype(int), 0, (_DECADES[1] - _DECADES[0]) * _CELLS - 1)
