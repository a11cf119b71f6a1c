"""Busy times of a real run's main job: the time that each pass of each iteration kept its rank busy.

The time between two waits of a rank is *busy* time; the waits themselves follow from the busy times of all ranks and
the schedule, so they are predicted and not copied.

All ranks must share one clock and so one machine.  Megatron ends an iteration with several collectives across the
stages (gradients of shared embeddings, the gradient norm); an iteration ends, and the next begins, at the last of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.schedule import Pass, Schedule
from megatron.fill.pipeline.timeline import Compiled, Timeline
from megatron.fill.types import RankRecord
from megatron.fill.wings.sim.recorded.parts import RecordedIteration, RecordedTransfers, parts_of


@dataclass(frozen=True, slots=True)
class RankSample:
    """Busy times of a rank in an iteration."""

    passes_ns: tuple[int, ...]  # duration of each pass in the schedule's order, including the work up to the next wait
    # Time from the last pass to the exit from the first collective, without the wait for the other ranks.
    reduced_ns: int
    # Time from the first collective to the next iteration's first pass, if all iterations are alike: further
    # collectives, the optimizer, logging, data.
    after_ns: int


@dataclass(frozen=True, slots=True)
class IterationSample:
    """An iteration of all ranks, in the order of their stages."""

    iteration: int
    period_ns: int  # time from the previous iteration's end, when all ranks had left its last collective, to this one's
    filling: bool
    p2p_ns: int  # mean duration of a transfer between two ranks once both are ready
    ranks: tuple[RankSample, ...]


class RecordedMainJob:
    """The iterations of one pipeline, with their common schedule.

    Args:
        records: one record per stage, all of one pipeline (such as data-parallel and tensor-parallel rank 0).
        schedule: schedule of the run.
        rendezvous: True if a send waits for its receiver (gloo).

    Attributes:
        samples: the completely recorded iterations, in order.

    Raises:
        ValueError: the records do not match the schedule.
    """

    def __init__(self, records: Sequence[RankRecord], schedule: Schedule, rendezvous: bool = True) -> None:
        ordered = sorted(records, key=lambda record: record.info.stage)
        if [record.info.stage for record in ordered] != list(range(schedule.stages)):
            stages = [record.info.stage for record in ordered]
            raise ValueError(f"there are records of stages {stages}; expected one of each of {schedule.stages}")
        self.schedule = schedule
        self._compiled = Compiled(schedule, rendezvous)
        parts = [parts_of(record, row) for record, row in zip(ordered, schedule.order, strict=True)]
        common = [number for number in parts[0] if all(number in part for part in parts)]
        if not common:
            raise ValueError(f"no iteration has the spans of all passes of\n{schedule}")
        drains = Counter(min(len(part[number].drains) for part in parts) for number in common)
        self._collectives = drains.most_common(1)[0][0]
        if self._collectives < 1:
            raise ValueError("no iteration ends with a collective across the stages; expected a drain bubble")
        whole = [n for n in common if all(len(part[n].drains) >= self._collectives for part in parts)]
        self._transfers = RecordedTransfers(schedule, rendezvous)
        follows = set(whole)
        self.samples = [
            self._sample([part[number - 1] for part in parts], [part[number] for part in parts])
            for number in whole
            if number - 1 in follows
        ]
        if not self.samples:
            raise ValueError("no iteration follows another whole one; expected a run with spans of several")

    def _sample(self, last: list[RecordedIteration], parts: list[RecordedIteration]) -> IterationSample:
        start_ns = max(part.drains[-1].end_ns for part in last)
        end_ns = max(part.drains[-1].end_ns for part in parts)
        met = [max(part.drains[at].start_ns for part in parts) for at in range(-self._collectives, 0)]
        return IterationSample(
            iteration=parts[0].iteration.iteration,
            period_ns=end_ns - start_ns,
            filling=parts[0].iteration.filling,
            p2p_ns=self._transfers.mean_ns(parts, self._collectives),
            ranks=tuple(_rank_sample(part, start_ns, met) for part in parts),
        )

    def costs(self, samples: Iterable[IterationSample] | None = None) -> PipelineCosts:
        """Return the median costs of some iterations (default: all), for simulations of other sizes.

        The first collective is part of ``reduce_ns``, and everything after it part of ``optimizer_ns``, including
        further collectives, which are too short to be filled.
        """
        chosen = self.samples if samples is None else list(samples)
        if not chosen:
            raise ValueError("there is no iteration; expected at least one to take the costs from")
        passes: defaultdict[tuple[int, Pass], list[int]] = defaultdict(list)
        for sample in chosen:
            for rank, row in enumerate(self.schedule.order):
                for op, duration_ns in zip(row, sample.ranks[rank].passes_ns, strict=True):
                    passes[self.schedule.virtual_stage(rank, op), op.kind].append(duration_ns)
        stages = tuple(
            StageCost(int(median(passes[stage, Pass.FORWARD])), int(median(passes[stage, Pass.BACKWARD])))
            for stage in range(self.schedule.virtual_stages)
        )
        ranks = range(self.schedule.stages)
        return PipelineCosts(
            stages,
            int(median(sample.p2p_ns for sample in chosen)),
            tuple(int(median(sample.ranks[rank].reduced_ns for sample in chosen)) for rank in ranks),
            tuple(int(median(sample.ranks[rank].after_ns for sample in chosen)) for rank in ranks),
        )

    def timeline(self, costs: PipelineCosts) -> Timeline:
        """Return an iteration of the same schedule with other costs."""
        return self._compiled.run(costs)


def _rank_sample(part: RecordedIteration, begin_ns: int, met_ns: list[int]) -> RankSample:
    """Return a rank's busy times.

    Args:
        begin_ns: beginning of the iteration.
        met_ns: time at which all ranks had reached each of its collectives.
    """
    count = len(met_ns)
    cuts = [part.cut_ns(at) for at in range(len(part.spans) + 1)]
    waits = [sum(bubble.duration_ns for bubble in before) for before in part.before]
    held_ns = sum(bubble.duration_ns for bubble in part.drains[:-count])  # by its last sends
    final = part.drains[-count:]
    # A collective lasts from the arrival of the last rank until this one had left it.
    first_ns, *further_ns = (max(0, one.end_ns - met) for one, met in zip(final, met_ns, strict=True))
    between_ns = sum(after.start_ns - before.end_ns for before, after in pairwise(final))
    return RankSample(
        passes_ns=tuple(cuts[at + 1] - cuts[at] - wait for at, wait in enumerate(waits)),
        reduced_ns=final[0].start_ns - cuts[-1] - held_ns + first_ns,
        after_ns=max(0, cuts[0] - begin_ns) + between_ns + sum(further_ns),
    )
