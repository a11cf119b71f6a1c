"""The choice of the ranks and iterations to draw, and one time axis for the events of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from megatron.fill.records.tables import column
from megatron.fill.report.build import SegmentSums
from megatron.fill.types import Bubble, Iteration, RankRecord, Span, WorkerRecord

MANY = 16  # ranks, above which they are not drawn or listed one by one
_LOOK_BACK = 1000  # iterations considered, from the end
_GAP = 1.1  # a window longer than its iterations by this factor contains something else, such as an evaluation


class Step(NamedTuple):
    """A step of a job."""

    job: str
    start_ns: int
    end_ns: int


type Event = Iteration | Span | Bubble | Step


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of consecutive iterations."""

    first: int  # number of its first iteration
    last: int
    start_ns: int  # on the clock of the lowest rank's node
    end_ns: int
    shift_ns: dict[int, int]  # offset to add to a rank's times for that clock, by rank

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def place(self, rank: int, start_ns: int, end_ns: int) -> tuple[int, int] | None:
        """Return start (from the window's) and duration of a rank's event, clipped to the window; None if outside."""
        start = start_ns + self.shift_ns.get(rank, 0) - self.start_ns
        end = start + end_ns - start_ns
        if end <= 0 or start >= self.duration_ns:
            return None
        start, end = max(start, 0), min(end, self.duration_ns)
        return start, end - start

    def events(self, record: RankRecord, workers: Sequence[WorkerRecord]) -> Iterator[tuple[Event, int, int]]:
        """Yield a rank's iterations, passes, bubbles and steps of jobs in the window, each with its ``place``."""
        rank = record.info.rank
        its = [one for one in record.iterations if self.first <= one.iteration <= self.last]
        steps = [Step(worker.job, *step) for worker in workers if worker.rank == rank for step in worker.steps]
        events: Iterator[Event] = chain(its, near(record.spans, self), near(record.bubbles, self), steps)
        for one in events:
            if placed := self.place(rank, one.start_ns, one.end_ns):
                yield one, *placed


def near[T](values: Sequence[T], window: Window) -> Sequence[T]:
    """Return the bubbles or spans of a rank that may lie in the window; a long record has many more."""
    places = [
        at
        for at, iteration in enumerate(column(values, "iteration"))
        if window.first - 1 <= iteration <= window.last  # an evaluation belongs to the iteration before it
    ]
    return values[places[0] : places[-1] + 1] if places else ()


def choose_window(ranks: Sequence[RankRecord], workers: Sequence[WorkerRecord], iterations: int) -> Window | None:
    """Choose ``iterations`` consecutive iterations that all ranks recorded; None if they have none in common.

    Preferred are iterations with filling on and steps of jobs in each, then iterations with filling on: a run that ends
    in a block with filling off, or after its jobs, is still shown at work.  Then a window without an evaluation inside
    is preferred, and then the last one.
    """
    if not ranks or iterations < 1:
        return None
    by_number = [{item.iteration: item for item in record.iterations} for record in ranks]
    common = sorted(set.intersection(*(set(items) for items in by_number)))[-_LOOK_BACK:]
    if not common:
        return None
    shift_ns = clock_shifts(ranks, by_number, common)
    steps = np.sort([start + shift_ns.get(worker.rank, 0) for worker in workers for start, _ in worker.steps] or [0])
    reference, offset = by_number[0], shift_ns[ranks[0].info.rank]

    def merit(numbers: Sequence[int]) -> tuple[bool, bool, bool, int]:
        items = [reference[number] for number in numbers]
        filling = all(item.filling for item in items)
        edges = np.searchsorted(steps, [(item.start_ns + offset, item.end_ns + offset) for item in items])
        busy = bool((edges[:, 1] > edges[:, 0]).all())
        spent = sum(item.duration_ns for item in items)
        whole = items[-1].end_ns - items[0].start_ns <= _GAP * spent
        return filling and busy, filling, whole, numbers[-1]

    length = min(iterations, len(common))
    chosen = max((common[at : at + length] for at in range(len(common) - length + 1)), key=merit)
    edges = [
        (items[chosen[0]].start_ns + shift, items[chosen[-1]].end_ns + shift)
        for items, shift in zip(by_number, (shift_ns[record.info.rank] for record in ranks), strict=True)
    ]
    return Window(chosen[0], chosen[-1], min(start for start, _ in edges), max(end for _, end in edges), shift_ns)


def clock_shifts(
    ranks: Sequence[RankRecord], by_number: Sequence[dict[int, Iteration]], common: Iterable[int]
) -> dict[int, int]:
    """Return the clock shift of each rank's node, in ns, by rank: nodes do not share CLOCK_MONOTONIC.

    An iteration ends with a collective of all ranks, so its ends are assumed to be simultaneous.
    """
    ends: defaultdict[int, list[float]] = defaultdict(list)
    home = ranks[0].info.node
    for number in common:
        by_node: defaultdict[int, list[int]] = defaultdict(list)
        for record, items in zip(ranks, by_number, strict=True):
            by_node[record.info.node].append(items[number].end_ns)
        base = by_node[home][0]  # means of small differences: a float does not hold large times exactly
        means = {node: fmean(end - base for end in its) for node, its in by_node.items()}
        for node, mean in means.items():
            ends[node].append(means[home] - mean)
    shifts = {node: 0 if node == home else round(median(its)) for node, its in ends.items()}
    return {record.info.rank: shifts[record.info.node] for record in ranks}


@dataclass(frozen=True, slots=True)
class Shown:
    """The records that the picture, the trace and the page show."""

    ranks: Sequence[RankRecord]  # ascending by rank
    workers: Sequence[WorkerRecord]
    what: str = ""  # description of the ranks, such as ``data-parallel rank 3 of 128``; empty if all ranks are shown
    iterations: int = 3  # the most that trace and page show

    def window(self, iterations: int) -> Window | None:
        """Return ``choose_window`` of these records."""
        return choose_window(self.ranks, self.workers, iterations)


def choose_shown(segments: Mapping[int, SegmentSums]) -> tuple[int, Sequence[int], str]:
    """Return the number of the segment to show, its ranks, and their description (``Shown.what``).

    It is the last segment in which jobs ran, or else the last one with iterations; no ranks if there is none.  Of a
    segment with more than ``MANY`` ranks, one pipeline (the ranks with equal data-, tensor- and context-parallel
    ranks) is shown: the one that harvested the most.
    """
    worth = [(any(its.harvested.values()), number) for number, its in segments.items() if any(its.iterations.values())]
    if not worth:
        return 0, (), ""
    number = max(worth)[1]
    sums = segments[number]
    if len(sums.infos) <= MANY:
        return number, sorted(info.rank for info in sums.infos), ""
    replicas: dict[tuple[int, int, int], list[int]] = {}
    for info in sorted(sums.infos, key=lambda info: info.rank):
        place = info.data_parallel_rank, info.tensor_parallel_rank, info.context_parallel_rank
        replicas.setdefault(place, []).append(info.rank)
    place, ranks = max(replicas.items(), key=lambda one: sum(sums.harvested[rank] for rank in one[1]))
    counts = [len(set(its)) for its in zip(*replicas, strict=True)]
    its = zip(("data", "tensor", "context"), place, counts, strict=True)
    what = (f"{name}-parallel rank {at} of {count}" for name, at, count in its if count > 1)
    return number, ranks, ", ".join(what)
