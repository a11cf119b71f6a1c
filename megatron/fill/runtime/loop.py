"""The inside of a worker: run steps while the next one fits, then sleep (FreeRide, section 4.3)."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron.fill.gate import GateReader, OpenBubble
from megatron.fill.runtime.estimate import StepEstimator
from megatron.fill.runtime.steplog import StepLog, WorkerPhase
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.types import BubbleUse

_PROBE_AFTER = 32  # bubbles without a step before one is tried all the same


class StepLoop:
    """Runs one task's steps in the bubbles of one gate.

    Args:
        machine: the task, in state PAUSED.
        stopping: tells between steps whether the worker was asked to stop.
    """

    def __init__(
        self,
        machine: TaskMachine,
        gate: GateReader,
        log: StepLog,
        stopping: Callable[[], bool],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.machine = machine
        self.gate = gate
        self.log = log
        self.stopping = stopping
        self.clock = clock
        self.estimator = StepEstimator()
        self._pause_ns = 0
        self._skipped = 0

    def run(self) -> bool:
        """Go on until the task is finished (True), or the main job is over or a stop was asked for (False)."""
        seq = 0
        while not (self.gate.ended or self.stopping()):
            bubble = self.gate.wait(seq)
            if bubble is not None:
                seq = bubble.seq
                if self.fill(bubble):
                    return True
        return False

    def fill(self, bubble: OpenBubble) -> bool:
        """Use one open bubble; whether the task finished in it."""
        if not self._fits(bubble, self.clock()):
            self._skipped += 1
            if self._skipped < _PROBE_AFTER:
                return False
            # The estimate may stem from a few slow steps only; without a try it could never be corrected.
        self._skipped = 0
        log = self.log
        log.enter_bubble(bubble.seq)
        log.phase = WorkerPhase.START
        self.machine.start()
        finished, first_ns, last_ns, spent_ns, steps = self._steps(bubble)
        log.phase = WorkerPhase.PAUSE
        before_ns = self.clock()
        self.machine.pause()
        now_ns = self.clock()
        self._pause_ns = now_ns - before_ns
        closed_ns = self.gate.closed_ns(bubble.seq)
        overrun_ns = max(0, last_ns - closed_ns) if closed_ns is not None and steps else 0
        latency_ns = first_ns - bubble.opened_ns if steps else -1
        log.leave_bubble(
            BubbleUse(bubble.seq, latency_ns, max(0, spent_ns - overrun_ns), overrun_ns, steps), bubble.alone
        )
        log.phase = WorkerPhase.ASLEEP
        return finished

    def _steps(self, bubble: OpenBubble) -> tuple[bool, int, int, int, int]:
        log, clock, machine = self.log, self.clock, self.machine
        log.phase = WorkerPhase.STEP
        first_ns = end_ns = spent_ns = steps = 0
        start_ns = clock()
        while True:
            try:
                work = machine.run_next_step()
            except StopIteration:
                return True, first_ns, end_ns, spent_ns, steps
            end_ns = clock()
            self.estimator.observe(end_ns - start_ns)
            log.step_ended(start_ns, end_ns, work, bubble.alone)
            first_ns = first_ns or start_ns
            spent_ns += end_ns - start_ns
            steps += 1
            start_ns = clock()
            if not (self._fits(bubble, start_ns) and self.gate.is_open(bubble.seq)) or self.stopping():
                return False, first_ns, end_ns, spent_ns, steps

    def _fits(self, bubble: OpenBubble, now_ns: int) -> bool:
        return now_ns + self.estimator.estimate_ns + self._pause_ns <= bubble.deadline_ns
