"""Replay of a rank's bubbles in virtual time, by the same listener and step loop that fill real ones.

Only the clock, the gate and the task are simulated (``virtual.py``).  On the CPU, a step that is interrupted by the end
of its bubble loses the core at once and stays in flight: it resumes in the rank's next wait, even if the gate is closed
then (``docs/design.md``, "Gate, worker, agent").
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
from megatron.fill.types import Bubble, CycleKey, RankInfo
from megatron.fill.worker.loop import StepLoop
from megatron.fill.worker.pacing import StepDevice, StepPages
from scripts.benchmarks.studies.truth.steps import StepTimes
from scripts.benchmarks.studies.truth.virtual import Core, Replayed, VirtualGate, VirtualLog, VirtualMachine


@dataclass(frozen=True, slots=True)
class PlayedIteration:
    """A simulated iteration of a rank.

    Attributes:
        start_ns: beginning on the whole run's clock.
        waits: waits in ns from ``start_ns``; every iteration has the same number, since predictions are by position.
        filling: True if its bubbles are filled.
    """

    iteration: int
    start_ns: int
    waits: Sequence[Wait]
    filling: bool = True


@dataclass(frozen=True, slots=True)
class Opened:
    """The bubbles of one rank, in order, and its gate's messages about them.

    Attributes:
        bubbles: all bubbles; those without a ``seq`` are waits in which only a step in flight resumes.
        told: the gate's messages by ``seq``.
    """

    bubbles: Sequence[Bubble]
    told: Mapping[int, OpenBubble]


class _Gate:
    """The rank's end of a gate (GateWriter) that records its calls."""

    def __init__(self) -> None:
        self.told: dict[int, OpenBubble] = {}
        self.now_ns = 0

    def open(self, deadline_ns: int, free_bytes: int, ends_ns: Sequence[int] = (), overrun_ns: int = 0) -> int:
        seq = len(self.told) + 1
        self.told[seq] = OpenBubble(seq, self.now_ns, deadline_ns, free_bytes, False, tuple(ends_ns), overrun_ns)
        return seq

    def close(self, now_ns: int) -> None:
        """Do nothing: no reader waits."""

    def brake(self, on: bool) -> None:
        """Ignore the brake, which does not exist here."""

    def end(self) -> None:
        """Do nothing: no reader waits."""


class _Record(Recorder):
    """A recorder that keeps all bubbles, without a limit."""

    def bubble(self, bubble: Bubble) -> None:
        self.bubbles.append(bubble)


@dataclass(slots=True)
class _Switch:
    """A switch that is on in the iterations with filling (RankSwitch)."""

    running: bool = True
    settled: bool = True


def open_bubbles(iterations: Iterable[PlayedIteration], key: CycleKey, rule: FillRule) -> Opened:
    """Return the bubbles as the rank would record them: predicted, and with a ``seq`` if its gate opens."""
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
        preemptive: True if a step loses the core at the end of its bubble, as for ``Core``.
    """
    done = Replayed()
    core = Core(opened.bubbles, preemptive)
    log = VirtualLog(core, times.gap_ns, done)
    gate = VirtualGate(core, opened.told, cycle(times.wakes_ns))
    machine = VirtualMachine(core, times)
    # These have all methods of a task, gate and log that the loop calls; it never checks their types.
    pages, device = StepPages(gate, cast(Any, log)), StepDevice(preemptive=preemptive)
    loop = StepLoop(cast(Any, machine), pages, lambda: core.over, device, clock=lambda: core.now_ns)
    loop.estimators.expect(times.profile_ns)
    loop.run()
    return done
