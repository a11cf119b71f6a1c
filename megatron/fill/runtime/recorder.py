"""What one rank saw: its iterations, its bubbles, and the compute spans of its last iterations."""

from __future__ import annotations

from collections import deque

from megatron.fill.types import BrakeEvent, Bubble, BubbleKind, CycleKey, Iteration, RankInfo, RankRecord, Span

_KEPT_BUBBLES = 200_000


class Recorder:
    """Collects plain tuples while training runs, and makes records of them at the end.

    Args:
        trace_iterations: of how many last iterations the compute spans are kept.
    """

    def __init__(self, info: RankInfo, trace_iterations: int) -> None:
        self.info = info
        self.bubbles: list[Bubble] = []
        self.iterations: list[Iteration] = []
        self.brakes: list[BrakeEvent] = []
        self.schedule: CycleKey | None = None  # of the last training iteration
        # A few iterations more than are drawn: the last ones may be a block without filling, or cut short.
        self._spans: deque[list[Span]] = deque(maxlen=trace_iterations + 20)

    def iteration_started(self) -> None:
        self._spans.append([])

    def span(self, name: str, iteration: int, start_ns: int, end_ns: int) -> None:
        if self._spans:
            self._spans[-1].append(Span(name, iteration, start_ns, end_ns))

    def bubble(self, bubble: Bubble) -> None:
        self.bubbles.append(bubble)
        if len(self.bubbles) >= _KEPT_BUBBLES:
            self._fold()

    def record(self) -> RankRecord:
        spans = [span for spans in self._spans for span in spans]
        return RankRecord(self.info, self.iterations, self.bubbles, spans, self.brakes, self.schedule)

    def _fold(self) -> None:
        """Replace the older half of the bubbles by their sums, so that a long run does not fill the memory.

        A sum is a bubble with index -1 that starts at 0 and lasts as long as those it stands for.
        """
        half = len(self.bubbles) // 2
        sums: dict[tuple[BubbleKind, bool, bool], int] = {}
        for bubble in self.bubbles[:half]:
            key = (bubble.kind, bubble.filling, bubble.forward_only)
            sums[key] = sums.get(key, 0) + bubble.duration_ns
        self.bubbles[:half] = [
            Bubble(0, -1, kind, 0, total_ns, filling=filling, forward_only=forward_only)
            for (kind, filling, forward_only), total_ns in sums.items()
        ]
