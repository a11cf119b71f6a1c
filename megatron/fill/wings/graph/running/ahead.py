"""Frozen operators of a graph pipeline, computed ahead in the bubbles of all ranks.

A frozen encoder's output for a microbatch depends on the data alone, so it can be computed at any time before it is
needed, and on any rank.  Here every rank has the frozen operators, and computes some of the microbatches of this and
the next iteration while it waits for other stages; the outputs go to the stages that take them.  They are bit-identical
to those computed within the forward pass.  The idea is that of Optimus (USENIX ATC 2025): an encoder's work in the
bubbles of the language model.

This is work of the training itself, in its own process: unlike a job's, its results are used.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.fill.errors import GraphError
from megatron.fill.hooks import Callback

_REMEMBERED = 8  # number of recent waits kept per place in the schedule
_NEVER = 1 << 62  # number of a microbatch that never comes
_TURNS = 32  # period of the order in which ranks compute microbatches

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Frozen:
    """An operator whose passes run ahead."""

    name: str
    module: torch.nn.Module
    inputs: tuple[str, ...]  # the operators whose output it takes, which run ahead, too
    # Shape and dtype of its output.
    shape: tuple[int, int, int]
    dtype: torch.dtype = torch.float32


class _Sent(NamedTuple):
    unit: int
    request: Any
    tensor: torch.Tensor  # to be kept until it is received


class Ahead(Callback):
    """Runs one rank's share of the frozen operators.

    Microbatches are numbered from the first of the run.  Those of the first iteration are computed where they are
    needed, and each other one by the rank that ``turns`` assigns: a rank with longer bubbles computes more.  A rank is
    at most two iterations ahead of its own forward passes.  A late microbatch is computed in the next wait, however
    short that is, so no rank waits forever.

    Args:
        operators: the operators, each after its inputs.
        takers: per rank, the operators whose output its stage takes.
        turns: the ranks that compute successive microbatches; repeated when it ends.
        rank: this rank.
        group: a process group of all ranks (one per entry of ``takers``), used for nothing else.
        microbatches: number of microbatches in an iteration.
        total: returns the number of microbatches in the run; called once the run has begun.
        slack: number of microbatches that some stage receives in advance of its next forward pass
            (``Runnable.received_ahead``); a microbatch is late from ``slack`` passes before its own on.
    """

    def __init__(
        self,
        operators: Sequence[Frozen],
        takers: Sequence[tuple[str, ...]],
        turns: Sequence[int],
        rank: int,
        group: Any,
        microbatches: int,
        total: Callable[[], int],
        clock: Callable[[], int] = time.monotonic_ns,
        slack: int = 0,
    ) -> None:
        self.operators = tuple(operators)
        self.in_bubbles = self.late = self.in_passes = 0  # numbers of operators run
        self._slack = slack
        self._takers, self._turns, self._rank = takers, turns, rank
        self._group, self._microbatches = group, microbatches
        self._by_name = {its.name: its for its in operators}
        self._total_of, self._total, self._clock = total, 0, clock
        self._source: Iterator[Batch] | None = None
        self._batches: dict[int, Batch] = {}
        self._fetched = 0
        self._begun = 0  # number of forward passes begun
        self._next = self._own_after(microbatches - 1)
        self._running: Iterator[str] | None = None
        self._ready: dict[int, dict[str, torch.Tensor]] = {}
        self._coming: dict[int, list[tuple[str, torch.Tensor, Any]]] = {}
        self._posted = microbatches
        self._sent: deque[_Sent] = deque()
        self._wait = 0
        self._lengths: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._took_ns: dict[str, int] = {}
        self._watcher = CallThread()

    def __str__(self) -> str:
        every = self.in_bubbles + self.late + self.in_passes
        return (
            f"rank {self._rank}: {self.in_bubbles} of {every} passes of frozen operators were in bubbles, and"
            f" {self.late} in waits that they may have made longer"
        )

    # Called by the bus.

    def on_schedule(self) -> None:
        self._wait = 0

    def on_wait[T](self, call: Callable[[], T]) -> Callable[[], T]:
        """Return a function that returns the call's result, after running operators while ``call`` waits.

        The next operator should end before this wait usually does.  The wait may end during an operator, which is
        short; if it was not run now, all of it would be left for later.
        """
        lengths = self._lengths[self._wait]
        self._wait += 1
        usual_ns = sorted(lengths)[_REMEMBERED // 2] if len(lengths) == _REMEMBERED else 0
        start_ns = self._clock()

        def timed() -> T:
            try:
                return call()
            finally:
                lengths.append(self._clock() - start_ns)

        end_ns = start_ns + usual_ns
        if not (self._is_late() or self._fits(end_ns)):
            return timed
        watched = self._watcher.submit(timed)
        while not watched.done():
            if self._fits(end_ns):
                self.in_bubbles += 1
            elif self._is_late():
                self.late += 1
            else:
                break
            self._step()
        return watched.result

    # Called by a stage.

    def next_batch(self, source: Iterator[Batch], training: bool) -> Batch:
        """Return the data of the stage's next forward pass."""
        if not training:
            return next(source)
        if self._source is None:
            self._total = self._total_of()
        self._source = source
        batch = self._batch(self._begun)
        self._begun += 1
        self._receive()
        for number in [one for one in self._batches if one < min(self._begun, self._next)]:
            del self._batches[number]
        while self._sent and self._sent[0].unit < self._begun - 2 * self._microbatches:
            self._sent.popleft().request.wait()
        return batch

    def outputs(self, batch: Batch, training: bool) -> dict[str, torch.Tensor]:
        """Return the frozen operators' outputs that this rank's stage takes, for the latest batch of ``next_batch``."""
        wanted, unit = self._takers[self._rank], self._begun - 1
        if not wanted:
            return {}
        if not training or unit < self._microbatches:
            values: dict[str, torch.Tensor] = {}
            for _ in self._passes(batch, values):
                self.in_passes += training
            return {name: values[name] for name in wanted}
        if self._owner(unit) != self._rank:
            coming = self._coming.pop(unit)
            for _, _, request in coming:
                request.wait()
            return {name: tensor for name, tensor, _ in coming}
        while unit not in self._ready:
            self._step()
            self.in_passes += 1
        return self._ready.pop(unit)

    def _owner(self, unit: int) -> int:
        return self._turns[unit % len(self._turns)]

    def _own_after(self, unit: int) -> int:
        """Return this rank's next microbatch after ``unit``; ``_NEVER`` if it has none."""
        following = range(unit + 1, unit + 1 + len(self._turns))
        return next((one for one in following if self._owner(one) == self._rank), _NEVER)

    @property
    def _horizon(self) -> int:
        return min(self._begun + 2 * self._microbatches, self._total)

    def _is_late(self) -> bool:
        """True if another stage may already be waiting for this rank's next microbatch."""
        return self._source is not None and self._next < self._horizon and self._next <= self._begun + self._slack

    def _fits(self, end_ns: int) -> bool:
        """True if there is an operator to run that should end before ``end_ns``."""
        if self._source is None or self._next >= self._horizon:
            return False
        longest_ns = max((self._took_ns.get(its.name, 0) for its in self.operators), default=0)
        return self._clock() + longest_ns < end_ns

    def _step(self) -> None:
        """Run one operator on this rank's first microbatch that is not done."""
        if self._running is None:
            self._values: dict[str, torch.Tensor] = {}
            self._running = self._passes(self._batch(self._next), self._values)
        start_ns = self._clock()
        name = next(self._running)
        self._took_ns[name] = self._clock() - start_ns
        if name == self.operators[-1].name:
            self._running = None
            self._deliver(self._next, self._values)
            self._next = self._own_after(self._next)

    @torch.no_grad()
    def _passes(self, batch: Batch, values: dict[str, torch.Tensor]) -> Iterator[str]:
        """Run the operators in order, one per item; yield the name of each."""
        for its in self.operators:
            values[its.name] = its.module([values[name] for name in its.inputs], batch)
            yield its.name

    def _deliver(self, unit: int, values: Mapping[str, torch.Tensor]) -> None:
        for rank, wanted in enumerate(self._takers):
            if rank == self._rank:
                if wanted:
                    self._ready[unit] = {name: values[name] for name in wanted}
                continue
            for name in wanted:
                tensor, its = values[name].contiguous(), self._by_name[name]
                if tensor.shape != its.shape or tensor.dtype != its.dtype:
                    raise GraphError(
                        f"{name} returns {tuple(tensor.shape)} in {tensor.dtype}; expected {its.shape} in {its.dtype}"
                    )
                request = dist.isend(tensor, group=self._group, group_dst=rank, tag=self._tag(unit, name))
                self._sent.append(_Sent(unit, request, tensor))

    def _receive(self) -> None:
        """Post receives for the outputs that other ranks will send."""
        for unit in range(self._posted, self._horizon):
            if self._owner(unit) != self._rank:
                self._coming[unit] = [self._asked(unit, name) for name in self._takers[self._rank]]
        self._posted = max(self._posted, self._horizon)

    def _asked(self, unit: int, name: str) -> tuple[str, torch.Tensor, Any]:
        its = self._by_name[name]
        tensor = torch.empty(its.shape, dtype=its.dtype)
        request = dist.irecv(tensor, group=self._group, group_src=self._owner(unit), tag=self._tag(unit, name))
        return name, tensor, request

    def _tag(self, unit: int, name: str) -> int:
        """Return a message tag that differs from those of all messages in flight."""
        place = [its.name for its in self.operators].index(name)
        return unit % (8 * self._microbatches) * len(self.operators) + place

    def _batch(self, number: int) -> Batch:
        assert self._source is not None
        while self._fetched <= number:
            self._batches[self._fetched] = next(self._source)
            self._fetched += 1
        return self._batches[number]


def turns(bubbles: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks that compute successive microbatches: each in proportion to its bubble time, spread evenly."""
    weights = list(bubbles) if any(bubbles) else [1.0] * len(bubbles)
    credits = [0.0] * len(weights)
    found = []
    for _ in range(_TURNS):
        credits = [credit + weight for credit, weight in zip(credits, weights, strict=True)]
        chosen = max(range(len(credits)), key=lambda rank: credits[rank])
        credits[chosen] -= sum(weights)
        found.append(chosen)
    return tuple(found)


class CallThread:
    """A daemon thread that makes calls, one at a time; a call that waits does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._make, name="pipefill-waits", daemon=True).start()

    def submit[T](self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def _make(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
