"""Busy times of a real run's main job: the time that each pass of each iteration kept its rank busy.

The time between two waits of a rank is *busy* time; the waits themselves follow from the busy times of all ranks and
the schedule, so they are predicted and not copied.  An iteration's busy times are kept together, since ranks that share
a machine are slow together, and the mean of a maximum is not the maximum of the means.

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
from megatron.fill.pipeline.timeline import Compiled, Timeline, Wait
from megatron.fill.types import BubbleKind, RankRecord
from megatron.fill.wings.sim.recorded.parts import RecordedIteration, RecordedTransfers, parts_of


@dataclass(frozen=True, slots=True)
class RankSample:
    """Busy times of a rank in an iteration.

    Attributes:
        lead_ns: time from the previous iteration's end (when all ranks had left its last collective) to the first wait
            or pass: the optimizer, logging, data.
        passes_ns: duration of each pass in the schedule's order, including the work up to the next wait.
        reduce_ns: time from the last pass to the first collective across the stages.
        tail_ns: time before each further collective.
        collectives_ns: duration of each collective, from the arrival of the last rank until this one had left it.
        outside_ns: part of the period outside ``train_step``, which does not count as the iteration's time.
    """

    lead_ns: int
    passes_ns: tuple[int, ...]
    reduce_ns: int
    tail_ns: tuple[int, ...]
    collectives_ns: tuple[int, ...]
    outside_ns: int

    @property
    def reduced_ns(self) -> int:
        """Time from the last pass to the exit from the first collective, without the wait for the other ranks."""
        return self.reduce_ns + self.collectives_ns[0]

    @property
    def after_ns(self) -> int:
        """Time from the first collective to the next iteration's first pass, if all iterations are alike."""
        return self.lead_ns + sum(self.tail_ns) + sum(self.collectives_ns[1:])


@dataclass(frozen=True, slots=True)
class IterationSample:
    """An iteration of all ranks, in the order of their stages.

    Attributes:
        start_ns, end_ns: times at which all ranks had left the last collective of the previous iteration and of this.
        filling, block: recorded values.
        p2p_ns: mean duration of a transfer between two ranks once both are ready.
        transfers_ns: duration of each wait's transfer, per rank.
    """

    iteration: int
    start_ns: int
    end_ns: int
    filling: bool
    block: int
    p2p_ns: int
    transfers_ns: tuple[tuple[int, ...], ...]
    ranks: tuple[RankSample, ...]


@dataclass(frozen=True, slots=True)
class SimulatedIteration:
    """An iteration simulated from busy times and the schedule.

    Attributes:
        period_ns: time until all ranks have left the last collective.
        iteration_ns: mean over the ranks of the time inside ``train_step``, as the report counts it.
        waits: waits of each rank in order, in ns from the start; every iteration has the same ones, some of length 0,
            so that a wait is identified by its position.
    """

    period_ns: int
    iteration_ns: float
    waits: tuple[tuple[Wait, ...], ...]


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
        whole = [number for number in common if all(self._fits(part[number]) for part in parts)]
        self._transfers = RecordedTransfers(schedule, rendezvous)
        follows = set(whole)
        self.samples = [
            self._sample([part[number - 1] for part in parts], [part[number] for part in parts])
            for number in whole
            if number - 1 in follows
        ]
        if not self.samples:
            raise ValueError("no iteration follows another whole one; expected a run with spans of several")

    def _fits(self, part: RecordedIteration) -> bool:
        return len(part.drains) >= self._collectives

    def _sample(self, last: list[RecordedIteration], parts: list[RecordedIteration]) -> IterationSample:
        start_ns = max(part.drains[-1].end_ns for part in last)
        end_ns = max(part.drains[-1].end_ns for part in parts)
        met = [max(part.drains[at].start_ns for part in parts) for at in range(-self._collectives, 0)]
        one = parts[0].iteration
        p2p_ns, transfers_ns = self._transfers.times_ns(parts, self._collectives)
        return IterationSample(
            iteration=one.iteration,
            start_ns=start_ns,
            end_ns=end_ns,
            filling=one.filling,
            block=one.block,
            p2p_ns=p2p_ns,
            transfers_ns=transfers_ns,
            ranks=tuple(_rank_sample(part, start_ns, end_ns, met) for part in parts),
        )

    def simulate(self, sample: IterationSample) -> SimulatedIteration:
        """Simulate an iteration with these busy times."""
        durations = [rank.passes_ns for rank in sample.ranks]
        timeline = self._compiled.run(self._costs(sample), durations, sample.transfers_ns, empty=True)
        waits = [list(row[:-1]) for row in timeline.waits]
        ready = [row[-1].start_ns for row in timeline.waits]  # the last wait is for the first collective
        left = [0]
        for at in range(self._collectives):
            met_ns = max(ready)
            left = [met_ns + rank.collectives_ns[at] for rank in sample.ranks]
            for of_rank, start_ns, end_ns in zip(waits, ready, left, strict=True):
                of_rank.append(Wait(BubbleKind.DRAIN, start_ns, end_ns))
            if at + 1 < self._collectives:
                ready = [end_ns + rank.tail_ns[at] for end_ns, rank in zip(left, sample.ranks, strict=True)]
        period_ns = max(left)
        iteration_ns = period_ns - sum(rank.outside_ns for rank in sample.ranks) / len(sample.ranks)
        return SimulatedIteration(period_ns, iteration_ns, tuple(map(tuple, waits)))

    def _costs(self, sample: IterationSample) -> PipelineCosts:
        # The passes count only with their recorded durations.
        nothing = tuple(StageCost(0, 0) for _ in range(self.schedule.virtual_stages))
        return PipelineCosts(
            nothing,
            sample.p2p_ns,
            tuple(rank.reduce_ns for rank in sample.ranks),
            tuple(rank.lead_ns for rank in sample.ranks),
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


def _rank_sample(part: RecordedIteration, begin_ns: int, end_ns: int, met_ns: list[int]) -> RankSample:
    """Return a rank's busy times.

    Args:
        begin_ns, end_ns: beginning and end of the iteration.
        met_ns: time at which all ranks had reached each of its collectives.
    """
    collectives = len(met_ns)
    cuts = [part.cut_ns(at) for at in range(len(part.spans) + 1)]
    waits = [sum(bubble.duration_ns for bubble in before) for before in part.before]
    held_ns = sum(bubble.duration_ns for bubble in part.drains[:-collectives])  # by its last sends
    final = part.drains[-collectives:]
    return RankSample(
        lead_ns=max(0, cuts[0] - begin_ns),
        passes_ns=tuple(cuts[at + 1] - cuts[at] - wait for at, wait in enumerate(waits)),
        reduce_ns=final[0].start_ns - cuts[-1] - held_ns,
        tail_ns=tuple(after.start_ns - before.end_ns for before, after in pairwise(final)),
        collectives_ns=tuple(max(0, one.end_ns - met) for one, met in zip(final, met_ns, strict=True)),
        outside_ns=end_ns - begin_ns - (part.iteration.end_ns - part.iteration.start_ns),
    )
