"""Streams of several GPUs, without time: what is enqueued on them, and whether all of it can come to its end.

A transfer is a rendezvous, as NCCL's are: it is over when both of its ends have begun.  Hosts never wait, so they have
enqueued everything before anything runs.  With ``one_queue`` all streams of a rank share one hardware queue, as with
``CUDA_DEVICE_MAX_CONNECTIONS=1``: what is behind an operation that cannot begin waits too.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

from megatron.fill.errors import FillError
from megatron.fill.rank.freewaits import _reached

type Element = tuple[str, int, int, int]  # send or recv; from, to, and which of these


@dataclass(eq=False)
class Op:
    """One operation of a stream.

    Attributes:
        after: what must be over before; for a ``transfer`` also that its stream has got there.
    """

    kind: str  # compute, write, wait or transfer
    stream: Any
    after: list[Op] = field(default_factory=list)
    word: tuple[int, int] = (0, 0)  # whose page, which word
    value: int = 0
    elements: tuple[Element, ...] = ()
    begun: bool = False
    over: bool = False


class Gpus:
    """The GPUs of all ranks, each of which has a current stream."""

    def __init__(self, ranks: int, *, one_queue: bool) -> None:
        self.one_queue = one_queue
        self.queues: list[list[Op]] = [[] for _ in range(ranks)]
        self.words: list[defaultdict[int, int]] = [defaultdict(int) for _ in range(ranks)]
        self.gone: list[defaultdict[int, int]] = [defaultdict(int) for _ in range(ranks)]
        self.rank = 0
        self.current: list[Any] = ["compute"] * ranks
        self._last: dict[tuple[int, Any], Op] = {}
        self._counts: defaultdict[tuple[Any, ...], int] = defaultdict(int)
        self._begun: set[Element] = set()

    def enqueue(self, kind: str, stream: Any = None, **more: Any) -> Op:
        """On the current stream of this rank, or another one."""
        stream = self.current[self.rank] if stream is None else stream
        op = Op(kind, stream, **more)
        last = self._last.get((self.rank, stream))
        if last is not None:
            op.after = [*op.after, last]
        self._last[self.rank, stream] = op
        self.queues[self.rank].append(op)
        return op

    def last(self) -> list[Op]:
        """What the current stream did last."""
        found = self._last.get((self.rank, self.current[self.rank]))
        return [] if found is None else [found]

    def transfer(self, elements: list[tuple[str, int]], stream: Any) -> Any:
        """Post sends to and receives from ranks, as one operation; a request to wait for."""
        named = []
        for way, other in elements:
            pair = (self.rank, other) if way == "send" else (other, self.rank)
            number = self._counts[(way, *pair)]
            self._counts[(way, *pair)] += 1
            named.append((way, *pair, number))
        op = self.enqueue("transfer", stream, after=self.last(), elements=tuple(named))
        return SimpleNamespace(wait=lambda: self.enqueue("compute", after=[op]))

    def run(self, order: Random) -> list[Op]:
        """Let everything run in some order; what is left when nothing moves any more."""
        waiting = [deque(op for op in queue if not op.begun) for queue in self.queues]
        in_flight = [(rank, op) for rank, queue in enumerate(self.queues) for op in queue if op.begun and not op.over]
        moved = True
        while moved:
            moved = False
            ranks = list(range(len(waiting)))
            order.shuffle(ranks)
            for rank in ranks:
                for op in self._can_begin(rank, waiting[rank]):
                    waiting[rank].remove(op)
                    self._begin(rank, op)
                    in_flight.append((rank, op))
                    moved = True
                    if order.random() < 0.5:
                        break
            for at in [one for one in in_flight if self._ends(one[1])]:
                at[1].over = moved = True
                in_flight.remove(at)
        return [op for queue in waiting for op in queue] + [op for _, op in in_flight]

    def _can_begin(self, rank: int, queue: deque[Op]) -> Iterator[Op]:
        for op in list(queue):
            able = all(before.over for before in op.after)
            if able and op.kind == "wait":
                able = _reached(self.words[op.word[0]][op.word[1]], op.value)
            if able:
                yield op
            elif self.one_queue:
                return

    def _begin(self, rank: int, op: Op) -> None:
        op.begun = True
        self._begun.update(op.elements)
        if op.kind == "write":
            self.words[op.word[0]][op.word[1]] = op.value

    def _ends(self, op: Op) -> bool:
        other = {"send": "recv", "recv": "send"}
        return all((other[way], *rest) in self._begun for way, *rest in op.elements)


class HeldStreams:
    """freewaits.Streams on them.

    Args:
        writes: how many succeed, before the driver refuses every further one.
    """

    def __init__(self, gpus: Gpus, rank: int, writes: int = 1 << 30) -> None:
        self._gpus, self._rank, self._writes = gpus, rank, writes

    def write(self, page: Any, index: int, value: int) -> None:
        self._writes -= 1
        if self._writes < 0:
            raise FillError("the CUDA driver's cuStreamWriteValue32_v2 failed with code 1")
        self._gpus.enqueue("write", word=(page.rank, index), value=value)

    @contextlib.contextmanager
    def held(self, sender: int, value: int) -> Iterator[None]:
        gpus, side = self._gpus, ("side", sender)
        gpus.enqueue("wait", side, after=gpus.last(), word=(self._rank, sender), value=value)
        before, gpus.current[self._rank] = gpus.current[self._rank], side
        try:
            yield
        finally:
            gpus.current[self._rank] = before
