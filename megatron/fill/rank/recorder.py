"""What one rank saw: its iterations, its bubbles, and the compute spans of its last iterations."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from megatron.fill.records import RankWriter, add_up, as_bubbles
from megatron.fill.types import BrakeEvent, Bubble, CycleKey, Iteration, RankInfo, RankRecord, Span

WRITE_EVERY = 10  # iterations; the same ones on all ranks, so that their pauses do not add up
_MORE_SPANS = 20  # than are drawn, in iterations: the last ones may be a block without filling, or cut short
_LAST_S = 10.0  # how long the disk is waited for at the end


class Recorder:
    """Collects plain values while training runs, and has them written every ``WRITE_EVERY`` iterations.

    Args:
        trace_iterations: of how many last iterations the compute spans are kept.
        path: the rank's record; None to keep all of it here.
        kept_bubbles: the most that may wait to be written; of more than these, sums are kept.
    """

    def __init__(
        self, info: RankInfo, trace_iterations: int, path: Path | None = None, kept_bubbles: int = 200_000
    ) -> None:
        self.info = info
        self.bubbles: list[Bubble] = []
        self.iterations: list[Iteration] = []
        self.brakes: list[BrakeEvent] = []  # all of them, whoever appends them
        self.schedule: CycleKey | None = None  # of the last training iteration
        self.settled_after = 0  # as RankRecord has it
        spans = trace_iterations + _MORE_SPANS
        self._spans: deque[list[Span]] = deque(maxlen=spans)
        self._writer = None if path is None else RankWriter(path, info, -(-spans // WRITE_EVERY))
        self._brakes_written = 0
        self._kept_bubbles = kept_bubbles

    def iteration_started(self) -> None:
        self._spans.append([])

    def iteration_ended(self, iteration: Iteration) -> None:
        """Called when nothing else is to be done for it; where the disk is slow, it is written with a later one."""
        self.iterations.append(iteration)
        if self._writer is not None and iteration.iteration % WRITE_EVERY == 0 and self._writer.ready:
            self._writer.add(self._taken())

    def span(self, name: str, iteration: int, start_ns: int, end_ns: int) -> None:
        if self._spans:
            self._spans[-1].append(Span(name, iteration, start_ns, end_ns))

    def bubble(self, bubble: Bubble) -> None:
        self.bubbles.append(bubble)
        if len(self.bubbles) >= self._kept_bubbles:
            self._fold()

    def record(self) -> RankRecord:
        """What has not been written."""
        spans = [span for spans in self._spans for span in spans]
        brakes = self.brakes[self._brakes_written :]
        return RankRecord(
            self.info, self.iterations, self.bubbles, spans, brakes, self.schedule, settled_after=self.settled_after
        )

    def close(self) -> bool:
        """Write the rest; False if not all of the record could be written, or that took too long."""
        return self._writer is None or self._writer.close(self._taken(), _LAST_S)

    def unwritten(self, most_bytes: int) -> bytes:
        """After ``close``: what of the record is in no file, as ``RankWriter`` has it."""
        return b"" if self._writer is None else self._writer.unwritten(most_bytes)

    def _taken(self) -> RankRecord:
        """What has not been written, which is forgotten here."""
        record = self.record()
        self._brakes_written = len(self.brakes)
        self.iterations, self.bubbles = [], []
        self._spans.clear()
        self._spans.append([])  # an evaluation may follow
        return record

    def _fold(self) -> None:
        """Replace the older half of the bubbles by their sums, so that a long run does not fill the memory."""
        half = len(self.bubbles) // 2
        self.bubbles[:half] = as_bubbles(add_up(self.bubbles[:half]))
