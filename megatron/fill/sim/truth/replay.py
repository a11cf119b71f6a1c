"""One rank's bubbles filled in virtual time, by the very predictor and step loop that fill real ones.

What is not real is the clock, the gate and the task (``virtual.py``).  On the CPU a step that is caught by the end of
its bubble loses the core at once and stays in flight: it goes on in the rank's next wait, whether the gate is open then
or not (``docs/design.md``, "Gate, worker, agent").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, cast

from megatron.fill.gate import OpenBubble
from megatron.fill.pipeline.timeline import Wait
from megatron.fill.predictor import BubblePredictor
from megatron.fill.rule import FillRule
from megatron.fill.runtime.loop import StepLoop
from megatron.fill.sim.truth.steps import StepTimes
from megatron.fill.sim.truth.virtual import Core, Replayed, VirtualGate, VirtualLog, VirtualMachine
from megatron.fill.types import Bubble, CycleKey


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


def open_bubbles(iterations: Iterable[PlayedIteration], key: CycleKey, rule: FillRule) -> Opened:
    """The bubbles as the rank would record them: predicted, and with a ``seq`` where its gate opens."""
    predictor = BubblePredictor(rule)
    bubbles = []
    told = {}
    seq = 0
    for played in iterations:
        predictor.cycle_started(key, played.start_ns)
        for index, (kind, start_ns, end_ns) in enumerate(played.waits):
            start_ns, end_ns = played.start_ns + start_ns, played.start_ns + end_ns
            forecast = predictor.forecast(kind, index, start_ns)
            opens = played.filling and forecast.fills
            seq += opens
            if opens:
                deadline_ns, ends_ns = forecast.told(start_ns - rule.guard_ns)
                told[seq] = OpenBubble(seq, start_ns, deadline_ns, 0, False, ends_ns, forecast.overrun_ns)
            bubbles.append(
                Bubble(
                    played.iteration,
                    index,
                    kind,
                    start_ns,
                    end_ns,
                    forecast.shortest_ns,
                    seq if opens else 0,
                    filling=played.filling,
                )
            )
            predictor.observe(kind, index, start_ns, end_ns)
    return Opened(bubbles, told)


def replay(opened: Opened, times: StepTimes, preempted: bool = True) -> Replayed:
    """Run the job's steps in the bubbles.

    Args:
        preempted: as ``Core`` has it.
    """
    done = Replayed()
    core = Core(opened.bubbles, preempted)
    log = VirtualLog(core, times.gap_ns, done)
    gate = VirtualGate(core, opened.told, cycle(times.wakes_ns))
    machine = VirtualMachine(core, times)
    # The loop asks of its task, gate and log what these answer; it never gets to know what they are.
    loop = StepLoop(
        cast(Any, machine), gate, cast(Any, log), lambda: core.over, lambda: core.now_ns, preempted=preempted
    )
    loop.estimators.expect(times.profile_ns)
    loop.run()
    return done
