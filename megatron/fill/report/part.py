"""The figures of one rank in one segment of a run, in a form that can be added up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from operator import add

import numpy as np

from megatron.fill.records.agent import forgets
from megatron.fill.records.tables import column
from megatron.fill.report.seen import KINDS, Bubbles, IterationTimes, Seen, uses_of
from megatron.fill.report.timeuse import TimeUse, time_use, time_use_unknown
from megatron.fill.types import BubbleKind, RankInfo, WorkerRecord


@dataclass(frozen=True, slots=True)
class JobWork:
    """The work of one job in bubbles, and while the training stood still (``alone``); times in nanoseconds."""

    work: float = 0.0
    steps: int = 0
    harvested_ns: int = 0
    alone_work: float = 0.0
    alone_ns: int = 0

    def __add__(self, other: JobWork) -> JobWork:
        return JobWork(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures that add up over ranks and segments; times in nanoseconds."""

    bubbles: Counter[BubbleKind] = field(default_factory=Counter)  # bubble time in completed training iterations
    evaluation: Counter[BubbleKind] = field(default_factory=Counter)  # bubble time in evaluations
    fillable: int = 0  # bubble time with filling on, after jobs had settled
    settling: int = 0  # the same while jobs of some rank still set themselves up
    harvested: int = 0  # time in steps inside fillable bubbles
    known: int = 0  # ``fillable`` of the ranks whose workers' records are complete
    known_harvested: int = 0  # ``harvested`` of these
    unknown: int = 0  # number of the others
    outside: Counter[BubbleKind] = field(default_factory=Counter)  # all time in waits outside the pipeline
    outside_fillable: Counter[BubbleKind] = field(default_factory=Counter)  # the part of it in ``fillable``
    # the part of it in ``harvested``, as far as the workers' records still have single bubbles
    outside_harvested: Counter[BubbleKind] = field(default_factory=Counter)
    time_use: Counter[TimeUse] = field(default_factory=Counter)  # ``fillable``, split by use
    alone: float = 0.0  # numerator of ``fill_efficiency``
    share: float = 0.0  # its denominator
    errors: int = 0  # sum of the absolute errors of the predicted durations
    predicted: int = 0  # number of bubbles of the pipeline with a prediction

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of a rank in a segment."""

    info: RankInfo
    iterations: IterationTimes
    # ns in iterations with filling on, each up to the start of the next (with an evaluation in between)
    filled: int
    figures: Figures
    done: list[tuple[str, JobWork]]  # job and work of each worker; a lower bound if ``figures`` are unknown
    latencies: np.ndarray  # ns of each recent bubble of its workers in which a step was begun
    overruns: np.ndarray  # of the same bubbles


def part_of(seen: Seen, workers: Sequence[WorkerRecord], known: bool = True) -> RankPart:
    """Return the part of one rank, from its record and those of its workers, if all of them are ``known``."""
    its, bubbles, uses = seen.iterations, _known_apart(seen.bubbles, workers), uses_of(workers)
    # Bubbles of an iteration that was cut off are left out of the shares, since its time is unknown.  Sums that stand
    # for older bubbles (index -1) are of completed iterations.
    ended = (bubbles.index < 0) | np.isin(bubbles.iteration, its.number)
    fillable = int(bubbles.duration[bubbles.filling].sum())
    # What each worker harvested before jobs had settled, or after the last bubble that was recorded, does not count.
    early = np.isin(uses["seq"], bubbles.seq[bubbles.settling])
    not_counted = early | (uses["seq"] > bubbles.seq.max(initial=0))
    apart = [int(uses["harvested_ns"][not_counted & (uses["worker"] == at)].sum()) for at in range(len(workers))]
    predicted = (bubbles.predicted > 0) & ~bubbles.outside
    harvested = sum(worker.harvested_ns for worker in workers) - sum(apart)
    alone, share = _efficiency(fillable, workers, apart) if known else (0.0, 0.0)
    outside = bubbles.outside & bubbles.filling
    figures = Figures(
        bubbles=_by_kind(bubbles, ended & ~bubbles.forward_only & ~bubbles.outside),
        evaluation=_by_kind(bubbles, bubbles.forward_only & ~bubbles.outside),
        fillable=fillable,
        settling=int(bubbles.duration[bubbles.settling].sum()),
        harvested=harvested,
        known=fillable if known else 0,
        known_harvested=harvested if known else 0,
        unknown=int(not known),
        outside=_by_kind(bubbles, bubbles.outside),
        outside_fillable=_by_kind(bubbles, outside),
        outside_harvested=Counter({kind: _harvested(uses, bubbles, outside, kind) for kind in KINDS}),
        time_use=Counter(time_use(bubbles, workers) if known else time_use_unknown(bubbles)),
        alone=alone,
        share=share,
        errors=int(np.abs(bubbles.predicted - bubbles.duration)[predicted].sum()),
        predicted=int(predicted.sum()),
    )
    done = [(worker.job, _job_work(worker)) for worker in workers]
    latencies, overruns = uses["latency_ns"][uses["latency_ns"] >= 0], uses["overrun_ns"][uses["steps"] > 0]
    return RankPart(seen.info, its, _filled(its), figures, done, latencies, overruns)


def _job_work(worker: WorkerRecord) -> JobWork:
    work, alone_work = finite(worker.work_done), finite(worker.alone_work)
    return JobWork(work, worker.steps_done, worker.harvested_ns, alone_work, worker.alone_ns)


def _known_apart(bubbles: Bubbles, workers: Sequence[WorkerRecord]) -> Bubbles:
    """Return the bubbles, with those before jobs had settled as filled ones if nobody knows what was harvested there.

    Otherwise that harvest would count, and the bubbles that it was in would not.
    """
    last = int(bubbles.seq[bubbles.settling].max(initial=-1))
    for worker in workers:
        seqs = column(worker.uses, "seq")
        unrecorded_ns = worker.harvested_ns - sum(column(worker.uses, "harvested_ns"))
        if forgets(unrecorded_ns, seqs[0] if seqs else 0, worker.older_uses, last):
            nothing = np.zeros_like(bubbles.settling)
            return replace(bubbles, filling=bubbles.filling | bubbles.settling, settling=nothing)
    return bubbles


def finite(work: float) -> float:
    """Return the work, or 0 for NaN and infinity: a task counts its own work and may report them."""
    return work if math.isfinite(work) else 0.0


def _filled(its: IterationTimes) -> int:
    """Return the ns from the start of each iteration with filling on to that of the next one, or else to its end."""
    if not len(its.number):
        return 0
    follows = np.append(np.diff(its.number) == 1, False)
    until_next = np.append(np.diff(its.start), 0)
    return int(np.where(follows, until_next, its.duration)[its.filling].sum())


def _harvested(uses: Mapping[str, np.ndarray], bubbles: Bubbles, chosen: np.ndarray, kind: BubbleKind) -> int:
    """Return the ns harvested in bubbles of a kind among the chosen ones, as far as single bubbles are recorded."""
    seqs = bubbles.seq[chosen & (bubbles.kind == KINDS.index(kind)) & (bubbles.seq > 0)]
    return int(uses["harvested_ns"][np.isin(uses["seq"], seqs)].sum())


def _efficiency(fillable_ns: int, workers: Sequence[WorkerRecord], apart: Sequence[int]) -> tuple[float, float]:
    """Return the ns that the work would have taken alone, and the fillable ns in which it was done.

    Their ratio is the fill efficiency: work per fillable second, relative to the same task's work per second with the
    device to itself.  Workers that ran one after the other on a rank share its fillable time in proportion to their
    harvest (equally, if none harvested anything).  A worker without a measurement alone is left out together with its
    share.  Work is assumed to be spread evenly over a worker's harvest, of which ``apart`` (ns) does not count.
    """
    alone = share = 0.0
    counted = [worker.harvested_ns - less for worker, less in zip(workers, apart, strict=True)]
    harvested = sum(counted)
    for worker, its in zip(workers, counted, strict=True):
        if worker.alone_ns <= 0 or worker.alone_work <= 0:
            continue
        part = its / worker.harvested_ns if worker.harvested_ns else 1.0
        alone += part * finite(worker.work_done) * worker.alone_ns / worker.alone_work
        share += fillable_ns * (its / harvested if harvested else 1 / len(workers))
    return alone, share


def _by_kind(bubbles: Bubbles, chosen: np.ndarray) -> Counter[BubbleKind]:
    kinds, durations = bubbles.kind[chosen], bubbles.duration[chosen]
    return Counter({kind: int(durations[kinds == code].sum()) for code, kind in enumerate(KINDS)})
