"""A training with varying passes, and the work of a side task in the bubbles of each of its stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from megatron.fill.pipeline.timeline import Compiled
from megatron.fill.rank.rule import FillRule
from megatron.fill.types import BubbleUse, CycleKey
from megatron.fill.wings.sim.filljobs.freeride import MeasuredStep
from megatron.fill.wings.sim.mainjob import MainJob
from scripts.benchmarks.studies.freeride.reserving import COMPILED, PYTHON, fill_reserved, reserved_ns
from scripts.benchmarks.studies.truth.replay import PlayedIteration, open_bubbles, replay
from scripts.benchmarks.studies.truth.steps import StepTimes

_DRAWS = 997  # number of random values that are drawn and then repeated


class Rule(StrEnum):
    """Rules by which bubbles are filled."""

    OURS = "ours"  # this runtime's predictor and step loop
    FREERIDE = "freeride_rule"  # reservation and polling


@dataclass(frozen=True, slots=True)
class Varying:
    """Assumed variations, which the artifact does not state.

    Attributes:
        passes: standard deviation of a pass over its mean.
        steps: standard deviation of the logarithm of a side task's step.
        wake_ns: time from our gate's opening to the first step.
    """

    passes: float = 0.01
    steps: float = 0.02
    wake_ns: int = 130_000


@dataclass(frozen=True, slots=True)
class BubbleTime:
    """The use of bubble time, in ns (the split of FreeRide's figure).

    Attributes:
        steps: time in which side tasks ran.
        runtime: time from a bubble's beginning to the first step, and between steps.
        short: time in which no step began because the rest was too short or was predicted to be.
        memory: time on stages with too little memory for a side task.
    """

    steps: int = 0
    runtime: int = 0
    short: int = 0
    memory: int = 0

    @property
    def total(self) -> int:
        return self.steps + self.runtime + self.short + self.memory

    def __add__(self, other: BubbleTime) -> BubbleTime:
        return BubbleTime(
            self.steps + other.steps, self.runtime + other.runtime, self.short + other.short, self.memory + other.memory
        )


def split(bubbles_ns: int, uses: Iterable[BubbleUse], gap_ns: int) -> BubbleTime:
    """Split the bubble time of a stage with a side task by its use.

    Args:
        bubbles_ns: total duration of its bubbles.
        gap_ns: time between two steps; after a bubble's last one it counts as too short a rest.
    """
    uses = list(uses)
    steps = sum(use.harvested_ns for use in uses)
    runtime = sum(max(0, use.latency_ns) + gap_ns * (use.steps - 1) for use in uses if use.steps)
    return BubbleTime(steps, runtime, bubbles_ns - steps - runtime)


@dataclass(frozen=True, slots=True)
class StageWork:
    """The work of a side task on one stage.

    Attributes:
        work: work done, in the task's unit.
        overrun_ns: time that its steps ran beyond the ends of bubbles.
    """

    work: float
    overrun_ns: int
    time: BubbleTime


class SimulatedTraining:
    """Iterations of a main job.

    Args:
        iterations: number of iterations that count; the predictor's warm-up iterations come before them.

    Attributes:
        counted_ns: duration of the iterations that count.
    """

    def __init__(self, job: MainJob, iterations: int, varying: Varying) -> None:
        self.job = job
        self.iterations = iterations
        self.varying = varying
        self._rule = FillRule(stages=job.parallel.pp)
        self._rows, end_ns = _played(job, self._rule.warmup + iterations, varying.passes)
        self.counted_ns = end_ns - self._rows[0][self._rule.warmup].start_ns

    def bubbles_ns(self, stage: int) -> int:
        """Total duration of a stage's bubbles in the iterations that count."""
        counted = self._rows[stage][self._rule.warmup :]
        return sum(end_ns - start_ns for played in counted for _, start_ns, end_ns in played.waits)

    def idle(self, stage: int) -> StageWork:
        """Return the result of a stage whose memory fits no side task."""
        return StageWork(0.0, 0, BubbleTime(memory=self.bubbles_ns(stage)))

    def fill(self, stage: int, step: MeasuredStep, compiled: bool, rule: Rule) -> StageWork:
        """Run a side task in this stage's bubbles."""
        random = np.random.default_rng([1, stage])
        varied = random.lognormal(0.0, self.varying.steps, _DRAWS) * step.mean_ns
        steps_ns = tuple(int(ns) for ns in varied)
        row = self._rows[stage]
        if rule is Rule.FREERIDE:
            loop = COMPILED if compiled else PYTHON
            times = StepTimes(steps_ns, loop.wakes_ns(random, _DRAWS), loop.sleep_ns, work=step.batch)
            # FreeRide profiles an iteration without filling.
            profiled = [end_ns - start_ns for _, start_ns, end_ns in row[0].waits]
            done = fill_reserved(row[self._rule.warmup :], profiled, times, reserved_ns(step.median_ns))
        else:
            times = StepTimes(steps_ns, (self.varying.wake_ns,), work=step.batch)
            key = CycleKey(self.job.schedule.name, self.job.schedule.microbatches)
            done = replay(open_bubbles(row, key, self._rule), times, preemptive=False)
        overrun_ns = sum(use.overrun_ns for use in done.uses)
        return StageWork(done.work_done, overrun_ns, split(self.bubbles_ns(stage), done.uses, times.gap_ns))


def _played(job: MainJob, iterations: int, noise: float) -> tuple[list[list[PlayedIteration]], int]:
    """Return each stage's iterations with varying passes, and the end of the last one."""
    random = np.random.default_rng(0)
    compiled, costs = Compiled(job.schedule, job.rendezvous), job.costs()
    mean = compiled.durations(costs)
    rows: list[list[PlayedIteration]] = [[] for _ in mean]
    start_ns = 0
    for number in range(iterations):
        durations = [[round(ns * random.normal(1.0, noise)) for ns in row] for row in mean]
        timeline = compiled.run(costs, durations, empty=True)
        for row, waits in zip(rows, timeline.waits, strict=True):
            row.append(PlayedIteration(number + 1, start_ns, waits))
        start_ns += timeline.period_ns
    return rows, start_ns
