"""The pulse of a rank: when something last moved in it, and what it waits for now; the last words of its board.

Layout, in 64-bit words::

    0  when this was looked at, CLOCK_MONOTONIC ns; 0 before the first look, and while it is being written
    1  when an iteration last ended, or a schedule last began      2  the iteration
    3  the longest iteration or rest so far                          4  1 + the kind of the open bubble; 0 for none
    5  when that opened        6  its stage        7  how many stages there are
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.types import BubbleKind

WORDS = 8
LOOK_S = 10.0  # how often a rank's own thread looks
_S = 1e9
_KINDS = tuple(BubbleKind)
_LEAST_S, _FIRST_S = 30.0, 300.0
_TIMES = 10  # the longest pause of the run so far


@dataclass(frozen=True, slots=True)
class Pulse:
    """What one look saw; times in ns, CLOCK_MONOTONIC.

    Attributes:
        looked_ns: when.
        moved_ns: when an iteration last ended, or a schedule (of an iteration, an evaluation) last began.
        iteration: the last one that began; 0 before the first.
        longest_ns: the longest that an iteration took, or that nothing moved before; 0 before the first has ended.
        waits: the kind of the open bubble; None outside of bubbles.
        waits_since_ns: when that opened.
    """

    looked_ns: int
    moved_ns: int
    iteration: int
    longest_ns: int
    waits: BubbleKind | None
    waits_since_ns: int
    stage: int
    stages: int

    @property
    def patience_s(self) -> float:
        """How long nothing may move before that is said: ten times the longest so far, and half a minute at least."""
        return max(_LEAST_S, _TIMES * self.longest_ns / _S) if self.longest_ns else _FIRST_S

    def still_s(self, now_ns: int) -> float:
        """For how long nothing has moved, as far as is known; 0 while that is usual.

        A process that does not even look any more (stopped, or stuck) has not moved since its last look.
        """
        silent = self.silent(now_ns)
        still_s = ((now_ns if silent else self.looked_ns) - self.moved_ns) / _S
        return still_s if silent or still_s > self.patience_s else 0.0

    def silent(self, now_ns: int) -> bool:
        """Whether the rank's own thread has not looked for long, which costs it nothing while it is alive."""
        return now_ns - self.looked_ns > 3 * LOOK_S * _S

    def waits_for(self, now_ns: int) -> str:
        """Whom it waits for and since when, in words."""
        if self.waits is None:
            return "is in no bubble: it computes, writes a checkpoint, or waits outside of the pipeline"
        whom = {
            BubbleKind.FILL: f"stage {(self.stage - 1) % self.stages}, for its first forward",
            BubbleKind.FWD_BWD: f"stage {(self.stage + 1) % self.stages}, for its first backward",
            BubbleKind.INTERIOR: "a neighbouring stage",
            BubbleKind.DRAIN: "all stages, in a collective after its last backward",
        }[self.waits]
        return f"waits for {whom} ({self.waits} bubble), for {(now_ns - self.waits_since_ns) / _S:.0f} s"


def write_pulse(words: memoryview, pulse: Pulse) -> None:
    """Show it; a reader that comes in between sees that it is being written."""
    words[0] = 0
    waits = 0 if pulse.waits is None else 1 + _KINDS.index(pulse.waits)
    shown = pulse.moved_ns, pulse.iteration, pulse.longest_ns, waits, pulse.waits_since_ns, pulse.stage, pulse.stages
    for at, value in enumerate(shown, 1):
        words[at] = value
    words[0] = pulse.looked_ns


def read_pulse(words: memoryview) -> Pulse | None:
    """What the last look saw; None before the first, or while one is being written (look again)."""
    looked_ns, moved_ns, iteration, longest_ns, waits, since_ns, stage, stages = words[:WORDS].tolist()
    if not looked_ns or words[0] != looked_ns or waits > len(_KINDS):
        return None
    kind = _KINDS[waits - 1] if waits else None
    return Pulse(looked_ns, moved_ns, iteration, longest_ns, kind, since_ns, stage, max(1, stages))
