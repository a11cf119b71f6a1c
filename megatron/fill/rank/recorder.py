"""The record of one rank: its iterations, its bubbles, and the compute spans of its last iterations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.records.rank import RankWriter, add_up, as_bubbles
from megatron.fill.types import BrakeEvent, Bubble, CycleKey, Iteration, RankInfo, RankRecord, Span

WRITE_EVERY = 10  # iterations between two writes; the same on all ranks, so that their pauses do not add up
_MORE_SPANS = 20  # iterations kept in addition to those drawn: the last ones may be unfilled or incomplete
_LAST_S = 10.0  # longest wait for the disk at the end


@dataclass(eq=False, repr=False)
class Recorder:
    """Collects plain values while training runs, and has them written every ``WRITE_EVERY`` iterations."""

    info: RankInfo
    trace_iterations: int  # number of last iterations whose compute spans are drawn
    path: Path | None = None  # the file for the rank's record; None to keep it in memory only
    kept_bubbles: int = 200_000  # largest number that wait to be written; beyond it, the older half is added up

    def __post_init__(self) -> None:
        self.bubbles: list[Bubble] = []
        self.iterations: list[Iteration] = []
        self.brakes: list[BrakeEvent] = []  # all events so far; the listener sets this to its brake's list
        self.schedule: CycleKey | None = None  # schedule of the last training iteration
        self.settled_after = 0  # ``RankRecord.settled_after``
        spans = self.trace_iterations + _MORE_SPANS
        self._spans: deque[list[Span]] = deque(maxlen=spans)
        self._writer = None if self.path is None else RankWriter(self.path, self.info, -(-spans // WRITE_EVERY))
        self._brakes_written = 0

    def iteration_started(self) -> None:
        self._spans.append([])

    def iteration_ended(self, iteration: Iteration) -> None:
        """Add an iteration, after all its other parts; if the disk is slow, it is written with a later one."""
        self.iterations.append(iteration)
        if self._writer is not None and iteration.iteration % WRITE_EVERY == 0 and self._writer.ready:
            self._writer.add(self._taken())

    def span(self, name: str, iteration: int, start_ns: int, end_ns: int) -> None:
        if self._spans:
            self._spans[-1].append(Span(name, iteration, start_ns, end_ns))

    def bubble(self, bubble: Bubble) -> None:
        self.bubbles.append(bubble)
        if len(self.bubbles) >= self.kept_bubbles:
            half = len(self.bubbles) // 2
            self.bubbles[:half] = as_bubbles(add_up(self.bubbles[:half]))

    def record(self) -> RankRecord:
        """Return the part of the record that has not been written."""
        spans = [span for spans in self._spans for span in spans]
        brakes = self.brakes[self._brakes_written :]
        return RankRecord(
            self.info, self.iterations, self.bubbles, spans, brakes, self.schedule, settled_after=self.settled_after
        )

    def close(self) -> bool:
        """Write the rest; False if not all of the record could be written, or that took too long."""
        return self._writer is None or self._writer.close(self._taken(), _LAST_S)

    def unwritten(self, most_bytes: int) -> bytes:
        """Return what could not be written (``RankWriter.unwritten``); after ``close``."""
        return b"" if self._writer is None else self._writer.unwritten(most_bytes)

    def _taken(self) -> RankRecord:
        record = self.record()
        self._brakes_written = len(self.brakes)
        self.iterations, self.bubbles = [], []
        self._spans.clear()
        self._spans.append([])  # an evaluation may follow
        return record
