"""A simulation of one GPU that a rank shares with a worker while a receive spins on it, in virtual time.

Three combinations of waiting and sharing are simulated:

- ``slices``: time-slicing, and a receive like NCCL's: its kernel spins, so the rank's context is runnable also while it
  waits, and takes every other time slice from a worker's step.  The transfer itself needs the rank's slices.
- ``host slices``: time-slicing, and a receive like gloo's: the host waits, and the worker has the GPU until the data
  have arrived.
- ``side by side``: MPS, and a receive like NCCL's: it spins on a few multiprocessors next to the worker's kernels.  Two
  computations at the same time have half of the GPU each.

None of this was measured on a GPU: the length of a slice and the round-robin order are assumptions.  The worker uses
the runtime's own predictor, window and estimator.  Each delay of a bubble's end counts in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

import numpy as np

from megatron.fill.pages.gate import OpenBubble
from megatron.fill.rank.predictor import BubblePredictor
from megatron.fill.rank.rule import FillRule
from megatron.fill.types import BubbleKind, CycleKey
from megatron.fill.worker.estimate import StepEstimator

_MS = 1_000_000
_LITTLE = 1e-9  # milliseconds
_KEY = CycleKey("1F1B", 8)


class SlicedSharing(StrEnum):
    """Ways for the rank to wait and for rank and worker to share the GPU."""

    SLICES = "slices"
    HOST_SLICES = "host slices"
    SIDE_BY_SIDE = "side by side"


@dataclass(frozen=True, slots=True)
class RankWaits:
    """A rank's iteration, in ms.

    Attributes:
        lengths: durations of its waits, from their opening to the arrival of the data.
        compute: computation before each wait.
        noise: deviation of each length.
        transfer: GPU time that the rank needs after the data's arrival to receive them.
    """

    lengths: Sequence[float] = (8.0, 8.0, 8.0, 40.0, 60.0)
    compute: float = 40.0
    noise: float = 1.0
    transfer: float = 0.5


@dataclass(frozen=True, slots=True)
class SlicedWorker:
    """A worker's steps, in ms.

    Attributes:
        step: duration of a step alone on the GPU.
        gap: time between two steps.
        wake: delay from the gate's opening to the first step.
    """

    step: float = 3.0
    gap: float = 0.05
    wake: float = 0.15


@dataclass(slots=True)
class Played:
    """Results of a simulation, in ms, over the iterations after the warm-up.

    Attributes:
        took: total duration of these iterations.
        worked: steps' work done within bubbles.
        bubbles: total duration of the bubbles without a worker.
        busy: time in which a step was in flight within a bubble, which a host's clock counts as harvested.
        late: delay of each filled bubble's end.
    """

    took: float = 0.0
    worked: float = 0.0
    bubbles: float = 0.0
    busy: float = 0.0
    late: list[float] = field(default_factory=list)


class SharedGpu:
    """The sharing of the GPU between rank and worker over time, in ms."""

    def __init__(self, sharing: SlicedSharing, slice_ms: float) -> None:
        self.now = 0.0
        self.left = 0.0  # remaining GPU time of the step in flight
        self.worked = 0.0
        self.busy = 0.0
        self.took: list[float] = []  # durations of completed steps since their launch
        self._launched = 0.0
        self._sharing, self._slice = sharing, slice_ms
        self._workers_turn = False
        self._turn_left = slice_ms

    def launch(self, step: float) -> None:
        """Launch a step; none may be in flight."""
        self.left, self._launched = step, self.now

    def go_on(self, needs: float, runnable: bool = True, computes: bool = False, until: float = inf) -> float:
        """Advance until the rank has had ``needs`` of the GPU, the step in flight has ended, or it is ``until``.

        Args:
            runnable: True if the rank's context has something to run, even a spinning kernel.
            computes: True if the rank's kernels fill the GPU.

        Returns:
            GPU time that the rank still needs.
        """
        while needs > _LITTLE and self.now < until - _LITTLE:
            rank, worker = self._rates(runnable, computes)
            ends = [until - self.now]
            if rank:
                ends.append(needs / rank)
            if worker:
                ends.append(self.left / worker)
            sliced = self._sharing is not SlicedSharing.SIDE_BY_SIDE and runnable
            if sliced:
                ends.append(self._turn_left)
            passed = min(ends)
            in_flight = self.left > 0
            self.now += passed
            needs -= rank * passed
            self.left -= worker * passed
            self.worked += worker * passed
            self.busy += passed if in_flight else 0.0
            self._turn_left -= passed if sliced else 0.0
            if in_flight and self.left <= _LITTLE:
                self.left = 0.0
                self.took.append(self.now - self._launched)
                self._workers_turn, self._turn_left = False, self._slice
                return needs
            if not runnable:  # the rank's next slice begins when the worker's present one is over
                self._workers_turn, self._turn_left = in_flight, self._slice
            elif self._turn_left <= _LITTLE:
                self._workers_turn, self._turn_left = not self._workers_turn and self.left > 0, self._slice
        return max(0.0, needs)

    def _rates(self, runnable: bool, computes: bool) -> tuple[float, float]:
        """Return the speeds of the rank and of the step in flight."""
        if not self.left:
            return float(runnable), 0.0
        if not runnable:
            return 0.0, 1.0
        if self._sharing is SlicedSharing.SIDE_BY_SIDE:
            return (0.5, 0.5) if computes else (1.0, 1.0)
        return float(not self._workers_turn), float(self._workers_turn)


def play(
    waits: RankWaits,
    worker: SlicedWorker | None,
    sharing: SlicedSharing,
    rule: FillRule,
    slice_ms: float = 2.0,
    iterations: int = 300,
    seed: int = 0,
) -> Played:
    """Simulate training iterations, with or without a worker in the bubbles."""
    random = np.random.default_rng(seed)
    gpu, predictor, estimator = SharedGpu(sharing, slice_ms), BubblePredictor(rule), StepEstimator()
    played = Played()
    began = 0.0
    for iteration in range(iterations):
        if iteration == rule.warmup:
            began = gpu.now
        predictor.cycle_started(_KEY, int(gpu.now * _MS))
        for index, length in enumerate(waits.lengths):
            needs = waits.compute
            while needs > _LITTLE:
                needs = gpu.go_on(needs, computes=True)
            opened, worked, busy = gpu.now, gpu.worked, gpu.busy
            arrival = opened + max(0.0, length + random.normal(0.0, waits.noise))
            forecast = predictor.forecast(BubbleKind.INTERIOR, index, int(opened * _MS))
            fills = worker is not None and iteration >= rule.warmup and forecast.fills
            bubble = None
            if fills:
                told = forecast.told(int(opened * _MS) - rule.guard_ns)
                bubble = OpenBubble(1, int(opened * _MS), told[0], 0, False, told[1], forecast.overrun_ns)
            _wait(gpu, sharing, arrival, waits.transfer, worker, bubble, estimator)
            predictor.observe(BubbleKind.INTERIOR, index, int(opened * _MS), int(gpu.now * _MS))
            if iteration >= rule.warmup:
                played.bubbles += arrival + waits.transfer - opened
                played.worked += gpu.worked - worked
                played.busy += gpu.busy - busy
                if fills:
                    played.late.append(gpu.now - arrival - waits.transfer)
    played.took = gpu.now - began
    return played


def _wait(
    gpu: SharedGpu,
    sharing: SlicedSharing,
    arrival: float,
    transfer: float,
    worker: SlicedWorker | None,
    bubble: OpenBubble | None,
    estimator: StepEstimator,
) -> None:
    """Simulate a wait: its receive, and the worker's steps in it."""
    spins = sharing is not SlicedSharing.HOST_SLICES
    next_at = gpu.now + worker.wake if worker is not None and bubble is not None else inf
    needs = transfer
    while needs > _LITTLE:
        while gpu.took:
            estimator.observe(int(gpu.took.pop() * _MS))
        if worker is not None and bubble is not None and not gpu.left and gpu.now >= next_at - _LITTLE:
            if bubble.fits(estimator.estimate_ns, int(gpu.now * _MS)):
                gpu.launch(worker.step)
            next_at = inf
        in_flight = gpu.left > 0
        until = inf if in_flight else next_at
        if gpu.now < arrival - _LITTLE:
            gpu.go_on(inf, runnable=spins, until=min(arrival, until))
        else:
            needs = gpu.go_on(needs, until=until)
        if in_flight and not gpu.left and worker is not None:
            next_at = gpu.now + worker.gap
