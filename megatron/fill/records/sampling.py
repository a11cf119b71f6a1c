"""Sampled iterations of a rank, whole, for those who show single bubbles while the training goes on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron.fill.records.account import MOST_SAMPLES


@dataclass(slots=True)
class SampledBubble:
    """A bubble of a sampled iteration; ``job`` had steps in it for ``harvested_ns``, as far as is known."""

    kind: str
    start_ns: int
    end_ns: int
    seq: int
    job: str = ""
    harvested_ns: int = 0


@dataclass(slots=True)
class Sample:
    """A sampled iteration of a rank, by the monotonic clock of its node."""

    iteration: int
    start_ns: int = 0
    end_ns: int = 0
    filling: bool = False
    bubbles: list[SampledBubble] = field(default_factory=list)


class Samples:
    """The latest sampled iterations of a rank, one of ``every``; also such of which only bubbles are known so far."""

    def __init__(self, every: int = 0) -> None:
        self.every = every  # 0 for none
        self._samples: dict[int, Sample] = {}

    def of(self, iteration: int) -> Sample | None:
        """Return the sample of an iteration, a new one if there is none; None unless it is sampled."""
        if not self.every or iteration <= 0 or iteration % self.every:
            return None
        while len(self._samples) > MOST_SAMPLES:
            del self._samples[min(self._samples)]
        return self._samples.setdefault(iteration, Sample(iteration))

    def use(self, job: str, uses: Iterable[tuple[int, int]]) -> None:
        """Note that a job used bubbles: ``uses`` has the number of each, and the ns harvested in it."""
        bubbles = {bubble.seq: bubble for sample in self._samples.values() for bubble in sample.bubbles if bubble.seq}
        if bubbles:
            for seq, harvested_ns in uses:
                if harvested_ns and (bubble := bubbles.get(seq)) is not None:
                    bubble.job, bubble.harvested_ns = job, harvested_ns

    def take(self, before: int) -> list[Sample]:
        """Remove and return the samples of iterations before this one that are complete."""
        numbers = sorted(number for number in self._samples if number < before)
        return [sample for number in numbers if (sample := self._samples.pop(number)).end_ns]
