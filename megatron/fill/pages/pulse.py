"""The pulse of a rank: its last progress and the bubble that it waits in; the last words of its board.

A thread of the rank (the relay's, on CUDA) writes it every ``LOOK_S``.  Layout, in 64-bit words; times in ns::

    0  time of this pulse, CLOCK_MONOTONIC; 0 before the first, and while one is being written
    1  time at which an iteration last ended or a schedule last began    2  the iteration
    3  the longest iteration or standstill so far                        4  1 + the kind of the open bubble; 0 for none
    5  start of that bubble        6  the rank's stage        7  number of stages
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.types import BubbleKind

WORDS = 8
LOOK_S = 10.0  # period of the pulse
_S = 1e9
KINDS = tuple(BubbleKind)
_LEAST_S, _FIRST_S = 30.0, 300.0  # the least patience, and the patience before the first iteration has ended
_TIMES = 10  # patience as a multiple of the longest iteration or standstill so far


@dataclass(frozen=True, slots=True)
class Pulse:
    """A pulse; times in ns, CLOCK_MONOTONIC."""

    looked_ns: int  # time of the pulse
    moved_ns: int  # time at which an iteration last ended, or a schedule (of an iteration, an evaluation) last began
    iteration: int  # last iteration that began; 0 before the first
    longest_ns: int  # longest iteration or standstill so far; 0 before the first iteration has ended
    waits: BubbleKind | None  # kind of the open bubble; None outside of bubbles
    waits_since_ns: int  # start of that bubble
    stage: int  # pipeline stage of the rank
    stages: int  # number of pipeline stages

    @property
    def patience_s(self) -> float:
        """Seconds without progress before a stall is reported: ten times the longest so far, and at least 30 s."""
        return max(_LEAST_S, _TIMES * self.longest_ns / _S) if self.longest_ns else _FIRST_S

    def still_s(self, now_ns: int) -> float:
        """Seconds without progress, as far as is known; 0 while that is usual.

        A process whose pulse has stopped counts as still since its last progress.
        """
        silent = self.silent(now_ns)
        still_s = ((now_ns if silent else self.looked_ns) - self.moved_ns) / _S
        return still_s if silent or still_s > self.patience_s else 0.0

    def silent(self, now_ns: int) -> bool:
        """True if the pulse is overdue: the thread that writes it is stopped or stuck."""
        return now_ns - self.looked_ns > 3 * LOOK_S * _S

    def waits_for(self, now_ns: int) -> str:
        """A phrase for the log: the stage that the rank waits for, and for how long."""
        if self.waits is None:
            return "is in no bubble: it computes, writes a checkpoint, or waits outside of the pipeline"
        whom = {
            BubbleKind.FILL: f"stage {(self.stage - 1) % self.stages}, for its first forward",
            BubbleKind.FWD_BWD: f"stage {(self.stage + 1) % self.stages}, for its first backward",
            BubbleKind.INTERIOR: "a neighbouring stage",
            BubbleKind.DRAIN: "all stages, in a collective after its last backward",
            BubbleKind.SAVE: "other ranks, in a checkpoint's save",
            BubbleKind.DATA: "the next batch",
            BubbleKind.GROUP: "other ranks, such as its replicas, in a collective",
        }[self.waits]
        return f"waits for {whom} ({self.waits} bubble), for {(now_ns - self.waits_since_ns) / _S:.0f} s"


def write_pulse(words: memoryview, pulse: Pulse) -> None:
    """Write the pulse; a reader in the middle of it finds that it is being written."""
    words[0] = 0
    waits = 0 if pulse.waits is None else 1 + KINDS.index(pulse.waits)
    shown = pulse.moved_ns, pulse.iteration, pulse.longest_ns, waits, pulse.waits_since_ns, pulse.stage, pulse.stages
    for at, value in enumerate(shown, 1):
        words[at] = value
    words[0] = pulse.looked_ns


def read_pulse(words: memoryview) -> Pulse | None:
    """The latest pulse; None before the first, or while one is being written (read again)."""
    looked_ns, moved_ns, iteration, longest_ns, waits, since_ns, stage, stages = words[:WORDS].tolist()
    if not looked_ns or words[0] != looked_ns or waits > len(KINDS):
        return None
    kind = KINDS[waits - 1] if waits else None
    return Pulse(looked_ns, moved_ns, iteration, longest_ns, kind, since_ns, stage, max(1, stages))
