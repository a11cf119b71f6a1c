"""A pipeline schedule as data: the passes that each rank runs, in order.

A model is cut into ``chunks * stages`` *virtual stages*; rank ``r`` holds the virtual stages ``chunk * stages + r``
(Megatron's interleaving; with one chunk a virtual stage is a stage).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


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

    @classmethod
    def parse(cls, text: str) -> Op:
        """Parse the text form.

        Raises:
            ValueError: ``text`` is not a pass.
        """
        match = re.fullmatch(r"([FBIW])(\d+)(?:\.(\d+))?", text)
        if match is None:
            raise ValueError(f"{text!r} is not a pass; expected such as F3, B0 or I2.1")
        return cls(Pass(match[1]), int(match[2]), int(match[3] or 0))


NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1")
_HEAD = re.compile(r"(\S+): (\d+) stages, (\d+) microbatches, (\d+) chunks:")
_LINE = re.compile(r"(\d+):((?: \S+)*)")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The passes of an iteration, rank by rank.

    The text form has a line per rank:

        1f1b: 2 stages, 2 microbatches, 1 chunks:
        0: F0 F1 B0 B1
        1: F0 B0 F1 B1

    Attributes:
        name: name of the schedule, one of ``NAMES``.
        stages: number of ranks.
        microbatches: number of microbatches.
        chunks: number of virtual stages per rank.
        order: passes of each rank, in order.

    Raises:
        ValueError: the schedule is not valid; the message shows it.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    order: tuple[tuple[Op, ...], ...]

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ValueError(f"{problem}; the schedule is\n{self}")

    @property
    def splits_backward(self) -> bool:
        """True if backward passes run in two parts."""
        return any(op.kind is Pass.WEIGHT for row in self.order for op in row)

    @property
    def virtual_stages(self) -> int:
        return self.chunks * self.stages

    def virtual_stage(self, rank: int, op: Op) -> int:
        """The virtual stage of a rank's pass, from 0."""
        return op.chunk * self.stages + rank

    def sources(self) -> list[list[int | None]]:
        """The number of the pass whose output each pass takes, per rank; None at the model's ends and for ``W``.

        Passes are numbered from 0, rank after rank.  The backward pass of the last virtual stage takes the loss of its
        own forward pass, which is no transfer.
        """
        passes = [(rank, op) for rank, row in enumerate(self.order) for op in row]
        numbers = {
            (op.kind is Pass.FORWARD, op.microbatch, self.virtual_stage(rank, op)): number
            for number, (rank, op) in enumerate(passes)
            if op.kind is not Pass.WEIGHT
        }

        def source(rank: int, op: Op) -> int | None:
            forward = op.kind is Pass.FORWARD
            virtual = self.virtual_stage(rank, op) + (-1 if forward else 1)
            if op.kind is Pass.WEIGHT or not 0 <= virtual < self.virtual_stages:
                return None
            return numbers[forward, op.microbatch, virtual]

        return [[source(rank, op) for op in row] for rank, row in enumerate(self.order)]

    def _problem(self) -> str:
        if self.name not in NAMES:
            return f"name is {self.name!r}; expected one of {', '.join(NAMES)}"
        if min(self.stages, self.microbatches, self.chunks) < 1:
            return "expected at least one stage, microbatch and chunk"
        if len(self.order) != self.stages:
            return f"there are {len(self.order)} rows; expected {self.stages}, one per rank"
        for rank, row in enumerate(self.order):
            if problem := self._row_problem(row):
                return f"rank {rank}: {problem}"
        needs = [[() if number is None else (number,) for number in row] for row in self.sources()]
        _, stuck = execution_order(needs)
        if stuck:
            places = ", ".join(f"rank {rank} at {self.order[rank][at]}" for rank, at in stuck)
            return f"it cannot be executed: each waits for another: {places}"
        return ""

    def _row_problem(self, row: tuple[Op, ...]) -> str:
        seen: set[Op] = set()
        for op in row:
            cell = op.microbatch, op.chunk
            if not (op.microbatch < self.microbatches and op.chunk < self.chunks):
                return f"{op} is outside of {self.microbatches} microbatches and {self.chunks} chunks"
            if op in seen:
                return f"{op} runs twice"
            if op.kind in (Pass.BACKWARD, Pass.INPUT):
                if Op(Pass.FORWARD, *cell) not in seen:
                    return f"{op} runs before its forward pass"
                if Op(Pass.BACKWARD if op.kind is Pass.INPUT else Pass.INPUT, *cell) in seen:
                    return f"{op} is both whole and split"
            elif op.kind is Pass.WEIGHT and Op(Pass.INPUT, *cell) not in seen:
                return f"{op} runs before its I pass"
            seen.add(op)
        for cell in ((microbatch, chunk) for microbatch in range(self.microbatches) for chunk in range(self.chunks)):
            if Op(Pass.FORWARD, *cell) not in seen:
                return f"{Op(Pass.FORWARD, *cell)} is missing"
            if Op(Pass.BACKWARD, *cell) not in seen and Op(Pass.WEIGHT, *cell) not in seen:
                return f"microbatch {cell[0]}, chunk {cell[1]} has no whole backward pass; expected B, or I and W"
        return ""

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.stages} stages, {self.microbatches} microbatches, {self.chunks} chunks:"]
        lines += [" ".join([f"{rank}:", *map(str, row)]) for rank, row in enumerate(self.order)]
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse the text form.

        Raises:
            ValueError: a line is wrong, which the message has, or the schedule is not valid.
        """
        head, *lines = text.strip().splitlines() or [""]
        match = _HEAD.fullmatch(head.strip())
        if match is None:
            raise ValueError(f"line 1 is {head!r}: expected such as '1f1b: 2 stages, 4 microbatches, 1 chunks:'")
        rows = []
        for rank, line in enumerate(lines):
            row = _LINE.fullmatch(line.strip())
            if row is None or int(row[1]) != rank:
                raise ValueError(f"line {rank + 2} is {line!r}: expected the passes of rank {rank}, '{rank}: F0 ...'")
            try:
                rows.append(tuple(map(Op.parse, row[2].split())))
            except ValueError as error:
                raise ValueError(f"line {rank + 2}: {error}") from error
        return cls(match[1], int(match[2]), int(match[3]), int(match[4]), tuple(rows))


def execution_order(needs: Sequence[Sequence[tuple[int, ...]]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Sort the steps of several ranks so that each comes after the steps that it needs.

    Args:
        needs: numbers of the steps that each step needs, per rank in the rank's order; steps are numbered from 0, rank
            after rank.

    Returns:
        Numbers of the steps in order, and the places at which ranks are stuck, as rank and position in its row; empty
        if all steps can run.
    """
    firsts = [0]
    for row in needs:
        firsts.append(firsts[-1] + len(row))
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
