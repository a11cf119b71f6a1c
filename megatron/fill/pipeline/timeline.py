"""The timeline of an iteration, computed from a schedule and its costs.  Times are nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from megatron.fill.pipeline.costs import PipelineCosts
from megatron.fill.pipeline.program import eager as eager_programs
from megatron.fill.pipeline.program import rendezvous as rendezvous_programs
from megatron.fill.pipeline.schedule import Op, Pass, Schedule, ScheduleError, execution_order
from megatron.fill.types import BubbleKind


class PassSpan(NamedTuple):
    """A pass on a rank; times from the iteration's start."""

    op: Op
    start_ns: int
    end_ns: int


class Wait(NamedTuple):
    """A bubble of a rank; times from the iteration's start."""

    kind: BubbleKind
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class Transfer(NamedTuple):
    """A transfer of a rank, of the tensor that pass ``op`` consumes; times from the iteration's start."""

    op: Op
    sends: bool  # True if the rank sends it, False if it receives it
    posted_ns: int  # time at which the rank has posted it
    over_ns: int  # time at which it is over


@dataclass(frozen=True, slots=True)
class Timeline:
    """An iteration in the steady state, from when all ranks leave the global collective to when they leave the next.

    A rank's optimizer, passes, reduction and waits add up to the period.
    """

    schedule: Schedule
    costs: PipelineCosts  # costs given; durations that replaced them are in ``spans``
    period_ns: int  # duration of the iteration
    spans: tuple[tuple[PassSpan, ...], ...]  # passes of each rank in order
    waits: tuple[tuple[Wait, ...], ...]  # bubbles of each rank in order; none has length 0 unless requested


class Compiled:
    """A schedule prepared for computing many timelines.

    Args:
        rendezvous: True if a transfer starts when both ends have posted it, and both wait for it; False if only its
            receiver waits.

    Raises:
        ScheduleError: with ``rendezvous``, ranks would wait for each other forever.
    """

    def __init__(self, schedule: Schedule, rendezvous: bool = False) -> None:
        self.schedule = schedule
        programs = rendezvous_programs(schedule) if rendezvous else eager_programs(schedule)
        firsts = list(accumulate((len(program.steps) for program in programs), initial=0))
        sent = {key: firsts[p.rank] + at for p in programs for key, at in p.sent.items()}
        received = {key: firsts[p.rank] + at for p in programs for key, at in p.received.items()}
        self._posts = sent, received
        posts = self._posts if rendezvous else (sent,)
        needs = [[tuple(ends[key] for ends in posts for key in step.transfers) for step in p.steps] for p in programs]
        order, stuck = execution_order(needs)
        if stuck:
            ranks = ", ".join(str(rank) for rank, _ in stuck)
            how = "it deadlocks where a sender waits for its receiver, as with gloo"
            raise ScheduleError(
                f"{how}: ranks {ranks} wait for each other's transfers forever", shown=f"; the schedule is\n{schedule}"
            )
        flat = [need for row in needs for need in row]
        before = dict.fromkeys(firsts[:-1], -1)  # element after the last step, whose end is time 0
        self._plan = tuple((step, before.get(step, step - 1), flat[step]) for step in order)
        self._firsts = tuple(firsts)
        steps = [step for program in programs for step in program.steps]
        self._kinds = tuple(step.kind for step in steps)
        self._may_wait = tuple(
            tuple(at for at in range(firsts[p.rank], firsts[p.rank + 1]) if flat[at]) for p in programs
        )
        self._passes = tuple(
            tuple((firsts[p.rank] + at, step.op) for at, step in enumerate(p.steps) if step.op is not None)
            for p in programs
        )

    def durations(self, costs: PipelineCosts) -> list[list[int]]:
        """The duration of each pass, per rank in the schedule's order; ValueError if the costs do not fit."""
        self._check(costs)
        table: list[dict[Pass, int]] = [
            {
                Pass.FORWARD: stage.forward_ns,
                Pass.BACKWARD: stage.backward_ns,
                Pass.INPUT: stage.backward_ns - stage.weight_ns,
                Pass.WEIGHT: stage.weight_ns,
            }
            for stage in costs.stages
        ]
        stage = self.schedule.virtual_stage
        return [[table[stage(rank, op)][op.kind] for op in row] for rank, row in enumerate(self.schedule.order)]

    def run(
        self,
        costs: PipelineCosts,
        durations: Sequence[Sequence[int]] | None = None,
        transfers: Sequence[Sequence[int]] | None = None,
        empty: bool = False,
    ) -> Timeline:
        """Compute the timeline of an iteration.

        Args:
            durations: duration of each pass, per rank in the schedule's order; None for those of the costs.
            transfers: duration of the transfer that each wait waits for, once both ends are ready, per rank without the
                last wait, which is for the collective; None for ``p2p_ns``.
            empty: True to list waits of length 0 too, so that a wait's position is the same in every iteration.

        Raises:
            ValueError: the number of ranks, chunks, passes or waits is wrong, or a time is negative.
        """
        if durations is None:
            durations = self.durations(costs)
        else:
            self._check(costs)
            _check_times("durations", durations, self.schedule.order)
        if transfers is not None:
            _check_times("transfers", transfers, self._may_wait)
        starts, ends = self._times(costs, durations, transfers)
        lasts = [ends[first - 1] for first in self._firsts[1:]]
        reduced = [last + reduce_ns for last, reduce_ns in zip(lasts, costs.reduce_ns, strict=True)]
        period_ns = max(reduced)
        kinds = self._kinds
        spans, waits = [], []
        for rank, passes in enumerate(self._passes):
            spans.append(tuple([PassSpan(op, starts[at], ends[at]) for at, op in passes]))
            row = [
                Wait(kinds[at], ends[at - 1], starts[at])
                for at in self._may_wait[rank]
                if empty or starts[at] > ends[at - 1]
            ]
            if empty or period_ns > reduced[rank]:
                row.append(Wait(BubbleKind.DRAIN, reduced[rank], period_ns))
            waits.append(tuple(row))
        return Timeline(self.schedule, costs, period_ns, tuple(spans), tuple(waits))

    def transfers(self, costs: PipelineCosts, rank: int) -> list[Transfer]:
        """The transfers of a rank with ``rendezvous``: those that it sends, then the others, as they are posted."""
        _, ends = self._times(costs, self.durations(costs), None)
        sent, received = self._posts
        return [
            Transfer(key[1], posts is sent, ends[at], max(ends[sent[key]], ends[received[key]]) + costs.p2p_ns)
            for posts in (sent, received)
            for key, at in posts.items()
            if self._firsts[rank] <= at < self._firsts[rank + 1]
        ]

    def _times(
        self, costs: PipelineCosts, durations: Sequence[Sequence[int]], transfers: Sequence[Sequence[int]] | None
    ) -> tuple[list[int], list[int]]:
        """The end of each step's wait, and the end of each step."""
        steps = self._firsts[-1]
        starts = [0] * steps
        ends = [0] * (steps + 1)
        takes = [0] * steps
        for rank, passes in enumerate(self._passes):
            takes[self._firsts[rank]] = costs.optimizer_ns[rank]
            for (at, _), duration_ns in zip(passes, durations[rank], strict=True):
                takes[at] = duration_ns
        transfer_ns = [costs.p2p_ns] * steps
        if transfers is not None:
            for waits, times in zip(self._may_wait, transfers, strict=True):
                for at, time_ns in zip(waits, times, strict=True):
                    transfer_ns[at] = time_ns
        for step, before, needs in self._plan:
            start = ends[before]
            p2p_ns = transfer_ns[step]
            for other in needs:
                ready = ends[other] + p2p_ns
                if ready > start:
                    start = ready
            starts[step] = start
            ends[step] = start + takes[step]
        return starts, ends

    def _check(self, costs: PipelineCosts) -> None:
        its = self.schedule
        if (costs.ranks, costs.chunks) != (its.stages, its.chunks):
            expected = f"expected {its.stages} with {its.chunks} each for {its.name}"
            raise ValueError(f"costs of {costs.ranks} ranks with {costs.chunks} virtual stages each; {expected}")


def _check_times(name: str, times: Sequence[Sequence[int]], expected: Sequence[Sequence[object]]) -> None:
    given, wanted = [len(row) for row in times], [len(row) for row in expected]
    if given != wanted:
        raise ValueError(f"{name} has {given} times per rank; expected {wanted}")
    least = min((time_ns for row in times for time_ns in row), default=0)
    if least < 0:
        raise ValueError(f"{name} has {least} ns; expected none to be negative")


def simulate(schedule: Schedule, costs: PipelineCosts, rendezvous: bool = False) -> Timeline:
    """Compute the timeline of an iteration, as ``Compiled`` does, which is faster for many iterations."""
    return Compiled(schedule, rendezvous).run(costs)
