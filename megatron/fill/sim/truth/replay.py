"""One rank's bubbles filled in virtual time, by the very listener and step loop that fill real ones.

What is not real is the clock, the gate and the task (``virtual.py``).  On the CPU a step that is caught by the end of
its bubble loses the core at once and stays in flight: it goes on in the rank's next wait, whether the gate is open then
or not (``docs/design.md``, "Gate, worker, agent").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, cast

from megatron.fill.pages.gate import OpenBubble
from megatron.fill.pipeline.timeline import Wait
from megatron.fill.rank.listener import RankListener
from megatron.fill.rank.predictor import BubblePredictor
from megatron.fill.rank.recorder import Recorder
from megatron.fill.rank.rule import FillRule
from megatron.fill.sim.truth.steps import StepTimes
from megatron.fill.sim.truth.virtual import Core, Replayed, VirtualGate, VirtualLog, VirtualMachine
from megatron.fill.types import Bubble, CycleKey, RankInfo
from megatron.fill.worker.loop import StepLoop


@dataclass(frozen=True, slots=True)
class PlayedIteration:
    """One iteration of one rank.

    Attributes:
        start_ns: of the whole run's clock.
        waits: in ns from ``start_ns``; as many in every iteration, for their positions are what is predicted.
        filling: whether its bubbles are filled.
    """

    iteration: int
    start_ns: int
    waits: Sequence[Wait]
    filling: bool = True


@dataclass(frozen=True, slots=True)
class Opened:
    """The bubbles of one rank, in order, and what its gate said of them.

    Attributes:
        bubbles: those without a ``seq`` are waits in which only a step in flight goes on.
        told: by ``seq``.
    """

    bubbles: Sequence[Bubble]
    told: Mapping[int, OpenBubble]


class _Gate:
    """The rank's end of a gate (GateWriter) that keeps what it is told."""

    def __init__(self) -> None:
        self.told: dict[int, OpenBubble] = {}
        self.now_ns = 0

    def open(self, deadline_ns: int, free_bytes: int, ends_ns: Sequence[int] = (), overrun_ns: int = 0) -> int:
        seq = len(self.told) + 1
        self.told[seq] = OpenBubble(seq, self.now_ns, deadline_ns, free_bytes, False, tuple(ends_ns), overrun_ns)
        return seq

    def close(self, now_ns: int) -> None:
        """Nobody waits here."""

    def brake(self, on: bool) -> None:
        """There is no brake."""

    def end(self) -> None:
        """Nobody waits here."""


class _Record(Recorder):
    """Keeps every bubble, however many there are."""

    def bubble(self, bubble: Bubble) -> None:
        self.bubbles.append(bubble)


@dataclass(slots=True)
class _Switch:
    """Whether the iteration is one that is filled (RankSwitch)."""

    running: bool = True
    settled: bool = True


def open_bubbles(iterations: Iterable[PlayedIteration], key: CycleKey, rule: FillRule) -> Opened:
    """The bubbles as the rank would record them: predicted, and with a ``seq`` where its gate opens."""
    gate, switch = _Gate(), _Switch()
    record = _Record(RankInfo(0, 1, 0, 1, 0, 1, 0, rule.stages), 0)
    listener = RankListener(gate, record, BubblePredictor(rule), lambda: 0, control=switch)
    for played in iterations:
        switch.running = played.filling
        start_ns = played.start_ns
        listener.iteration_started(played.iteration, start_ns)
        listener.cycle_started(key, start_ns)
        for index, wait in enumerate(played.waits):
            gate.now_ns = start_ns + wait.start_ns
            listener.bubble_opened(wait.kind, index, gate.now_ns)
            listener.bubble_closed(start_ns + wait.end_ns)
        listener.cycle_ended()
    return Opened(record.bubbles, gate.told)


def replay(opened: Opened, times: StepTimes, preemptive: bool = True) -> Replayed:
    """Run the job's steps in the bubbles.

    Args:
        preemptive: as ``Core`` has it.
    """
    done = Replayed()
    core = Core(opened.bubbles, preemptive)
    log = VirtualLog(core, times.gap_ns, done)
    gate = VirtualGate(core, opened.told, cycle(times.wakes_ns))
    machine = VirtualMachine(core, times)
    # The loop asks of its task, gate and log what these answer; it never gets to know what they are.
    loop = StepLoop(
        cast(Any, machine), gate, cast(Any, log), lambda: core.over, lambda: core.now_ns, preemptive=preemptive
    )
    loop.estimators.expect(times.profile_ns)
    loop.run()
    return done
