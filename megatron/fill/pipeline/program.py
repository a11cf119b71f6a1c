"""The program of a rank between two global collectives: its passes, and the waits between them.

A *step* is a wait, followed by a pass or nothing.  A step waits for the ends of other steps, so the steps of all ranks
are an acyclic graph, and the times of an iteration are its longest paths.

There are two kinds of transfers.  *Eager*: a transfer starts when its producer has finished; only the consumer waits
for it.  *Rendezvous*, as with gloo and NCCL's large messages: it starts when both ends have posted it, and both wait
for it at the places where Megatron waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from megatron.fill.pipeline.schedule import Op, Pass, Schedule
from megatron.fill.pipeline.schedules import interleaved_warmup, megatrons
from megatron.fill.types import BubbleKind

Key = tuple[int, Op]  # a transfer, named by rank and pass of its consumer


@dataclass(slots=True)
class Step:
    """A step of a rank: it waits for the transfers, in a bubble of this kind, and then runs the pass.

    There is no pass in a mere wait, nor, for the optimizer, in a rank's first step.
    """

    transfers: list[Key]
    op: Op | None
    kind: BubbleKind


@dataclass(slots=True)
class Program:
    """The steps of a rank, built in order."""

    rank: int
    passes: int  # number of passes that the rank runs
    steps: list[Step] = field(default_factory=lambda: [Step([], None, BubbleKind.FILL)])
    sent: dict[Key, int] = field(default_factory=dict)  # step at whose end each transfer out of the rank is posted
    received: dict[Key, int] = field(default_factory=dict)  # the same for those into it
    _run: int = field(default=0, init=False)
    _forwards: int = field(default=0, init=False)
    _backwards: int = field(default=0, init=False)

    def post(self, sends: list[Key], receives: list[Key]) -> None:
        """Post transfers at the end of the current step."""
        self.sent |= dict.fromkeys(sends, len(self.steps) - 1)
        self.received |= dict.fromkeys(receives, len(self.steps) - 1)

    def wait(self, transfers: list[Key]) -> None:
        """Add a step that waits until all these transfers are over."""
        if transfers:
            self.steps.append(Step(transfers, None, self._kind(transfers)))

    def exchange(self, sends: list[Key], receives: list[Key]) -> None:
        """Post transfers and wait for all of them: one call of Megatron's ``P2PCommunicator``."""
        self.post(sends, receives)
        self.wait(sends + receives)

    def compute(self, op: Op, transfers: list[Key] | None = None) -> None:
        """Add a step that waits for the transfers and runs a pass."""
        waits = transfers or []
        self.steps.append(Step(waits, op, self._kind(waits)))
        self._run += 1
        self._forwards += op.kind is Pass.FORWARD
        self._backwards += op.kind in (Pass.BACKWARD, Pass.INPUT)

    def _kind(self, transfers: list[Key]) -> BubbleKind:
        """The kind of a bubble at this place, as the bubble bus defines it (``hooks.py``)."""
        if self._forwards == 0:
            return BubbleKind.FILL
        if self._run == self.passes:
            return BubbleKind.DRAIN
        backward = any(rank == self.rank and op.kind is not Pass.FORWARD for rank, op in transfers)
        return BubbleKind.FWD_BWD if backward and self._backwards == 0 else BubbleKind.INTERIOR


class Transfers:
    """A schedule's transfers between ranks, named by the pass that consumes them."""

    def __init__(self, schedule: Schedule) -> None:
        keys = [(rank, op) for rank, row in enumerate(schedule.order) for op in row]
        self._incoming: set[Key] = set()
        self._outgoing: defaultdict[Key, list[Key]] = defaultdict(list)
        numbers = (number for row in schedule.sources() for number in row)
        for key, number in zip(keys, numbers, strict=True):
            if number is not None and keys[number][0] != key[0]:
                self._incoming.add(key)
                self._outgoing[keys[number]].append(key)

    def into(self, rank: int, op: Op | None) -> list[Key]:
        """The transfer that a rank must receive for a pass, as a list of one; empty if there is none."""
        return [(rank, op)] if op is not None and (rank, op) in self._incoming else []

    def out_of(self, rank: int, op: Op) -> list[Key]:
        """The transfers that a rank sends after a pass; both if it is the second of two that form one action."""
        return self._outgoing[rank, op]


def eager(schedule: Schedule) -> list[Program]:
    """The program of each rank with eager transfers, in which no sender waits."""
    transfers = Transfers(schedule)
    programs = [Program(rank, len(row)) for rank, row in enumerate(schedule.order)]
    for program in programs:
        for op in schedule.order[program.rank]:
            program.compute(op, transfers.into(program.rank, op))
            program.post(transfers.out_of(program.rank, op), [])
    return programs


def rendezvous(schedule: Schedule) -> list[Program]:
    """The program of each rank with rendezvous transfers, with calls in the order of Megatron's schedule functions."""
    transfers, write = Transfers(schedule), _writer(schedule)
    programs = [Program(rank, len(row)) for rank, row in enumerate(schedule.order)]
    for program in programs:
        write(schedule, transfers, program)
    return programs


def _writer(schedule: Schedule) -> Callable[[Schedule, Transfers, Program], None]:
    """Return the function that builds the schedule's programs: by its passes, as its name may be that of any file."""
    match megatrons(schedule):
        case "interleaved", int(group):
            return partial(_interleaved, group)
        case name, _:
            return partial(_plain, name == "gpipe")
    return _overlapped


def _plain(gpipe: bool, schedule: Schedule, transfers: Transfers, program: Program) -> None:
    """Build the program of ``forward_backward_pipelining_without_interleaving``.

    In the steady state, a send and the next receive are one call; in warm-up and cool-down they are two.
    """
    rank = program.rank
    row = schedule.order[rank]
    warmup = schedule.microbatches if gpipe else schedule.stages - rank - 1
    program.exchange([], transfers.into(rank, row[0]))
    for at, op in enumerate(row):
        program.compute(op)
        following = row[at + 1] if at + 1 < len(row) else None
        sends, receives = transfers.out_of(rank, op), transfers.into(rank, following)
        if following is not None and following.kind is not op.kind and warmup < schedule.microbatches:
            program.exchange(sends, receives)
        else:
            program.exchange(sends, [])
            program.exchange([], receives)


def _overlapped(schedule: Schedule, transfers: Transfers, program: Program) -> None:
    """Build the program of a schedule that Megatron does not have.

    A send and the next receive are posted together, and weight passes run while both are pending.  This applies 1F1B's
    steady state to warm-up and cool-down too.
    """
    rank = program.rank
    row = schedule.order[rank]
    following = [op for op in row if op.kind is not Pass.WEIGHT]
    pending = transfers.into(rank, row[0])
    program.post([], pending)
    for op in row:
        sends = transfers.out_of(rank, op)
        if op.kind is Pass.WEIGHT:
            program.compute(op)
            program.post(sends, [])  # of the pass that it forms one action with
            pending = pending + sends
            continue
        program.compute(op, pending)
        following.pop(0)
        receives = transfers.into(rank, following[0] if following else None)
        program.post(sends, receives)
        pending = sends + receives
    program.wait(pending)


def _interleaved(group: int, schedule: Schedule, transfers: Transfers, program: Program) -> None:
    """Build the program of ``forward_backward_pipelining_with_interleaving`` with ``overlap_p2p_comm``, the default.

    In warm-up and cool-down, one call sends and receives.  In the steady state, a rank waits for a forward's send at
    once (its output is deallocated), for a backward's send after the next backward, and for receives before passes in
    the order of posting, which is not always the order in which passes need them.  A leading rank posts its receives in
    the order in which the other end of the pipeline sends, ``stages - 1`` passes later.
    """
    rank, row = program.rank, schedule.order[program.rank]
    forwards = [op for op in row if op.kind is Pass.FORWARD]
    backwards = [op for op in row if op.kind is not Pass.FORWARD]
    warmup = interleaved_warmup(schedule.stages, schedule.microbatches, schedule.chunks, group, rank)
    total, lag, last = len(forwards), schedule.stages - 1, schedule.virtual_stages - 1

    def receive(ops: list[Op], at: int) -> list[Key]:
        if at == total - 1:
            return []
        if rank != (0 if ops is forwards else lag):  # it does not lead
            return transfers.into(rank, ops[at + 1])
        return transfers.into(rank, _next_chunk(ops[at - lag], schedule.chunks) if at >= lag else None)

    def awaited(op: Op, pending: list[Key]) -> list[Key]:
        from_data_or_loss = schedule.virtual_stage(rank, op) == (0 if op.kind is Pass.FORWARD else last)
        return [pending.pop(0)] if pending and not from_data_or_loss else []

    program.exchange([], transfers.into(rank, forwards[0]))
    for at in range(warmup):
        program.compute(forwards[at])
        program.exchange(transfers.out_of(rank, forwards[at]), receive(forwards, at))
    inputs: list[Key] = []
    gradients = transfers.into(rank, backwards[0])
    program.post([], gradients)
    unsent: list[Key] = []
    for at in range(total - warmup):
        forward, backward = forwards[warmup + at], backwards[at]
        program.compute(forward, awaited(forward, inputs))
        sends, receives = transfers.out_of(rank, forward), receive(forwards, warmup + at)
        program.post(sends, receives)
        inputs += receives
        program.wait(sends)
        program.compute(backward, awaited(backward, gradients))
        sends, receives = transfers.out_of(rank, backward), receive(backwards, at)
        program.post(sends, receives)
        gradients += receives
        program.wait(unsent)
        unsent = sends
    for at in range(total - warmup, total):
        program.compute(backwards[at], awaited(backwards[at], gradients))
        program.exchange(transfers.out_of(rank, backwards[at]), receive(backwards, at))
    program.wait(unsent)


def _next_chunk(op: Op, chunks: int) -> Op | None:
    """The pass that consumes the output of the pipeline's end: the same pass on its next chunk; None after the last."""
    chunk = op.chunk + (1 if op.kind is Pass.FORWARD else -1)
    return Op(op.kind, op.microbatch, chunk) if 0 <= chunk < chunks else None
