"""What one rank did in one segment of a run, in figures that can be added up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import add

import numpy as np

from megatron.fill.records import column
from megatron.fill.report.seen import KINDS, IterationTimes, Seen
from megatron.fill.report.timeuse import TimeUse, time_use, time_use_unknown
from megatron.fill.types import BubbleKind, RankInfo, WorkerRecord


@dataclass(frozen=True, slots=True)
class JobWork:
    """What one job did in bubbles, and while the main job stood still (``alone``); times in nanoseconds."""

    work: float = 0.0
    steps: int = 0
    harvested_ns: int = 0
    alone_work: float = 0.0
    alone_ns: int = 0

    def __add__(self, other: JobWork) -> JobWork:
        return JobWork(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank in one segment; times in nanoseconds.

    Attributes:
        number, duration, filling, block, watched: of its training iterations.
        filled: how long the training was in iterations with filling on, and in what followed each (an evaluation, say).
        bubbles, evaluation: by kind, in training iterations that ended and in evaluations.
        settling: of bubbles that were filled while jobs of some rank still set themselves up; not fillable.
        harvested: in steps inside fillable bubbles.
        time_use: of the fillable nanoseconds.
        alone, share: what ``fill_efficiency`` is made of.
        latencies, overruns: of the recent bubbles of its workers.
        errors: of predicted durations, in all; of so many.
        known: what its workers did; else ``done`` has no more than what happened to be written of it.
    """

    info: RankInfo
    segment: int
    number: np.ndarray
    duration: np.ndarray
    filling: np.ndarray
    block: np.ndarray
    watched: np.ndarray
    filled: int
    bubbles: dict[BubbleKind, int]
    evaluation: dict[BubbleKind, int]
    fillable: int
    settling: int
    harvested: int
    time_use: dict[TimeUse, int]
    alone: float
    share: float
    done: dict[str, JobWork]
    latencies: np.ndarray
    overruns: np.ndarray
    errors: int
    predicted: int
    known: bool = True


def part_of(segment: int, seen: Seen, workers: Sequence[WorkerRecord], known: bool = True) -> RankPart:
    """The part of one rank, from its record and those of the workers that ran in its bubbles.

    Args:
        known: these are all that these workers did.
    """
    its, bubbles = seen.iterations, seen.bubbles
    # What a broken-off iteration left has no iteration time to be a share of.  Sums that stand for older bubbles
    # (index -1) are of iterations that ended.
    ended = (bubbles.index < 0) | np.isin(bubbles.iteration, its.number)
    fillable = int(bubbles.duration[bubbles.filling].sum())
    early = _harvested_in(bubbles.seq[bubbles.settling], workers)
    predicted = bubbles.predicted > 0
    alone, share = _efficiency(fillable, workers, early) if known else (0.0, 0.0)
    done: dict[str, JobWork] = {}
    for worker in workers:
        its_alone = (finite(worker.alone_work), worker.alone_ns)
        more = JobWork(finite(worker.work_done), worker.steps_done, worker.harvested_ns, *its_alone)
        done[worker.job] = done.get(worker.job, JobWork()) + more
    return RankPart(
        info=seen.info,
        segment=segment,
        number=its.number,
        duration=its.duration,
        filling=its.filling,
        block=its.block,
        watched=its.watched,
        filled=_filled(its),
        bubbles=_by_kind(seen, ended & ~bubbles.forward_only),
        evaluation=_by_kind(seen, bubbles.forward_only),
        fillable=fillable,
        settling=int(bubbles.duration[bubbles.settling].sum()),
        harvested=sum(worker.harvested_ns for worker in workers) - sum(early),
        time_use=time_use(bubbles, workers) if known else time_use_unknown(bubbles),
        alone=alone,
        share=share,
        done=done,
        latencies=_of_uses(workers, "latency_ns", "latency_ns", 0),
        overruns=_of_uses(workers, "overrun_ns", "steps", 1),
        errors=int(np.abs(bubbles.predicted - bubbles.duration)[predicted].sum()),
        predicted=int(predicted.sum()),
        known=known,
    )


def finite(work: float) -> float:
    """A task counts its own work and may count NaN; such a count is worth nothing."""
    return work if math.isfinite(work) else 0.0


def _filled(its: IterationTimes) -> int:
    """From the start of each iteration with filling to that of the next one, or to its end where none follows."""
    if not len(its.number):
        return 0
    follows = np.append(np.diff(its.number) == 1, False)
    until_next = np.append(np.diff(its.start), 0)
    return int(np.where(follows, until_next, its.duration)[its.filling].sum())


def _harvested_in(seqs: np.ndarray, workers: Sequence[WorkerRecord]) -> list[int]:
    """What each worker harvested in these bubbles, as far as it is still known of single ones."""
    return [
        int(
            np.array(column(worker.uses, "harvested_ns"), dtype=np.int64)[
                np.isin(column(worker.uses, "seq"), seqs)
            ].sum()
        )
        if len(seqs) and len(worker.uses)
        else 0
        for worker in workers
    ]


def _efficiency(fillable_ns: int, workers: Sequence[WorkerRecord], early: Sequence[int]) -> tuple[float, float]:
    """The nanoseconds that the work would have taken alone, and the fillable ones that it was done in.

    Their ratio is the fill efficiency: work per fillable second, relative to the same task's work per second with the
    device to itself.  Workers that ran one after the other on a rank share its fillable seconds in proportion to what
    they harvested (equally, if none harvested anything).  A worker without a measurement alone is left out together
    with its share.  Work is taken to be spread evenly over what a worker harvested, of which ``early`` does not count.
    """
    alone = share = 0.0
    counted = [worker.harvested_ns - less for worker, less in zip(workers, early, strict=True)]
    harvested = sum(counted)
    for worker, its in zip(workers, counted, strict=True):
        if worker.alone_ns <= 0 or worker.alone_work <= 0:
            continue
        part = its / worker.harvested_ns if worker.harvested_ns else 1.0
        alone += part * finite(worker.work_done) * worker.alone_ns / worker.alone_work
        share += fillable_ns * (its / harvested if harvested else 1 / len(workers))
    return alone, share


def _by_kind(seen: Seen, chosen: np.ndarray) -> dict[BubbleKind, int]:
    kinds, durations = seen.bubbles.kind[chosen], seen.bubbles.duration[chosen]
    return {kind: int(durations[kinds == code].sum()) for code, kind in enumerate(KINDS)}


def _of_uses(workers: Sequence[WorkerRecord], name: str, by: str, least: int) -> np.ndarray:
    """One field of all uses that have at least so much of another."""
    values, known = (
        np.array([value for worker in workers for value in column(worker.uses, field)], dtype=np.int64)
        for field in (name, by)
    )
    return values[known >= least]
