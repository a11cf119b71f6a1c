"""A pipeline schedule as data: the passes that each rank runs, in order.

A model is cut into ``chunks * stages`` *virtual stages*; rank ``r`` holds the virtual stages ``chunk * stages + r``
(Megatron's interleaving; with one chunk a virtual stage is a stage).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise, product


class Pass(StrEnum):
    """The kind of a pass of one microbatch on one virtual stage."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole backward pass
    INPUT = "I"  # its part for the input's gradient, which the previous stage waits for
    WEIGHT = "W"  # its part for the weights' gradients, which no stage waits for


@dataclass(frozen=True, slots=True, order=True)
class Op:
    """A pass; its text form is ``F3``, or ``F3.1`` for chunk 1."""

    kind: Pass
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


class ScheduleError(ValueError):
    """An order of passes that is not a schedule; rank and position of the pass with the problem, if it is one's."""

    def __init__(self, problem: str, rank: int | None = None, at: int | None = None, shown: str = "") -> None:
        super().__init__(("" if rank is None else f"rank {rank}: ") + problem + shown)
        self.problem, self.rank, self.at = problem, rank, at


@dataclass(frozen=True, slots=True)
class Schedule:
    """The passes of an iteration, rank by rank; ScheduleError, which shows it, if it is not valid.

    The text form has a line per rank:

        1f1b: 2 stages, 2 microbatches, 1 chunks:
        0: F0 F1 B0 B1
        1: F0 B0 F1 B1
    """

    name: str
    stages: int
    microbatches: int
    chunks: int  # number of virtual stages per rank
    order: tuple[tuple[Op, ...], ...]  # passes of each rank, in order
    # Rank of each virtual stage, along the model; empty for Megatron's, ``0 1 2 0 1 2``.
    placement: tuple[int, ...] = ()
    # Rank and position of each pass that forms one action with the next (torch's ``OVERLAP_F_B``).  Such passes run
    # one after the other here, and what they send goes out after both, as in torch without a function for both.
    together: frozenset[tuple[int, int]] = frozenset()
    _held: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        if min(self.stages, self.microbatches, self.chunks) < 1:
            raise ScheduleError("expected at least one stage, microbatch and chunk", shown=f"; the schedule is\n{self}")
        if not self.placement:
            object.__setattr__(self, "placement", tuple(range(self.stages)) * self.chunks)
        held: list[list[int]] = [[] for _ in range(self.stages)]
        for virtual, rank in enumerate(self.placement):
            held[rank].append(virtual)
        object.__setattr__(self, "_held", tuple(map(tuple, held)))
        try:
            self._check()
        except ScheduleError as error:
            raise ScheduleError(error.problem, error.rank, error.at, f"; the schedule is\n{self}") from error

    @property
    def virtual_stages(self) -> int:
        return self.chunks * self.stages

    def virtual_stage(self, rank: int, op: Op) -> int:
        """The virtual stage of a rank's pass, from 0."""
        return self._held[rank][op.chunk]

    def sources(self) -> list[list[int | None]]:
        """The number of the pass whose output each pass takes, per rank; None at the model's ends and for ``W``.

        Passes are numbered from 0, rank after rank.  Of two passes that form one action, it is that of the second.  The
        backward pass of the last virtual stage takes the loss of its own forward pass, which is no transfer.
        """
        passes = [
            (rank, op, (rank, at) in self.together) for rank, row in enumerate(self.order) for at, op in enumerate(row)
        ]
        numbers = {
            (op.kind is Pass.FORWARD, op.microbatch, self.virtual_stage(rank, op)): number + first
            for number, (rank, op, first) in enumerate(passes)
            if op.kind is not Pass.WEIGHT
        }

        def source(rank: int, op: Op) -> int | None:
            forward = op.kind is Pass.FORWARD
            virtual = self.virtual_stage(rank, op) + (-1 if forward else 1)
            if op.kind is Pass.WEIGHT or not 0 <= virtual < self.virtual_stages:
                return None
            return numbers[forward, op.microbatch, virtual]

        return [[source(rank, op) for op in row] for rank, row in enumerate(self.order)]

    def _check(self) -> None:
        if len(self.order) != self.stages:
            raise ScheduleError(f"there are {len(self.order)} rows; expected {self.stages}, one per rank")
        if [len(held) for held in self._held] != [self.chunks] * self.stages:
            raise ScheduleError(f"placement is {self.placement}; expected {self.chunks} virtual stages on each rank")
        for rank, row in enumerate(self.order):
            self._check_row(rank, row)
        needs = [[() if number is None else (number,) for number in row] for row in self.sources()]
        _, stuck = execution_order(needs)
        if stuck:
            self._explain_cycle(needs, dict(stuck))

    def _check_row(self, rank: int, row: tuple[Op, ...]) -> None:
        seen: set[Op] = set()
        for at, op in enumerate(row):
            its = op.microbatch, op.chunk
            problem = ""
            if not (op.microbatch < self.microbatches and op.chunk < self.chunks):
                problem = f"is outside of {self.microbatches} microbatches and {self.chunks} chunks"
            elif op in seen:
                problem = "runs twice"
            elif op.kind in (Pass.BACKWARD, Pass.INPUT):
                if Op(Pass.FORWARD, *its) not in seen:
                    problem = "runs before its forward pass"
                elif Op(Pass.BACKWARD if op.kind is Pass.INPUT else Pass.INPUT, *its) in seen:
                    problem = "is both whole and split"
            elif op.kind is Pass.WEIGHT and Op(Pass.INPUT, *its) not in seen:
                problem = "runs before its I pass"
            if problem:
                raise ScheduleError(f"{op} {problem}", rank, at)
            seen.add(op)
        for microbatch, chunk in product(range(self.microbatches), range(self.chunks)):
            forward, whole, weight = (
                Op(kind, microbatch, chunk) for kind in (Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHT)
            )
            if forward not in seen:
                raise ScheduleError(f"{forward} is missing", rank)
            if whole not in seen and weight not in seen:
                cell = f"microbatch {microbatch}, chunk {chunk}"
                raise ScheduleError(f"{cell} has no whole backward pass; expected B, or I and W", rank)

    def _explain_cycle(self, needs: Sequence[Sequence[tuple[int, ...]]], stuck: dict[int, int]) -> None:
        """Raise the error that names a cycle of passes of which each waits for the next."""
        places = [(rank, at) for rank, row in enumerate(self.order) for at in range(len(row))]
        path = [next(iter(stuck))]
        while path[-1] not in path[:-1]:
            path.append(places[needs[path[-1]][stuck[path[-1]]][0]][0])
        cycle = path[path.index(path[-1]) :]
        links = []
        for rank, other in pairwise(cycle):
            source = self._action(*places[needs[rank][stuck[rank]][0]])
            before = self._action(other, stuck[other])
            after = f", which comes after {before}" if before != source else ""
            links.append(f"rank {rank} at {self._action(rank, stuck[rank])} waits for {source} of rank {other}{after}")
        first = cycle[0]
        raise ScheduleError(f"it cannot be executed: a cycle: {'; '.join(links)}", first, stuck[first])

    def _action(self, rank: int, at: int) -> str:
        """The pass at a place as text, with the other one of its action."""
        at -= (rank, at - 1) in self.together
        both = self.order[rank][at : at + 1 + ((rank, at) in self.together)]
        return f"({';'.join(map(str, both))})" if len(both) > 1 else str(both[0])

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.stages} stages, {self.microbatches} microbatches, {self.chunks} chunks:"]
        lines += [" ".join([f"{rank}:", *map(str, row)]) for rank, row in enumerate(self.order)]
        return "\n".join(lines)


def execution_order(needs: Sequence[Sequence[tuple[int, ...]]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Sort the steps of several ranks so that each comes after the steps that it needs.

    ``needs`` has those per rank, in the rank's order; steps are numbered from 0, rank after rank.  Returned are the
    numbers of the steps in order, and the places at which ranks are stuck, as rank and position in its row.
    """
    firsts = list(accumulate(map(len, needs), initial=0))
    done = bytearray(firsts[-1])
    at = [0] * len(needs)
    order: list[int] = []
    waiting: dict[int, list[int]] = {}  # step -> ranks that wait for it
    ready = list(range(len(needs)))[::-1]
    while ready:
        rank = ready.pop()
        row, first = needs[rank], firsts[rank]
        while at[rank] < len(row):
            missing = [step for step in row[at[rank]] if not done[step]]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            step = first + at[rank]
            done[step] = 1
            order.append(step)
            at[rank] += 1
            if step in waiting:
                ready += waiting.pop(step)
    return order, [(rank, position) for rank, position in enumerate(at) if position < len(needs[rank])]
