"""The inside of a worker: run steps while the next one fits, then sleep (FreeRide, section 4.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megatron.fill.control import AlwaysRunning, RunSwitch
from megatron.fill.gate import GateReader, OpenBubble
from megatron.fill.profiles import JobProfile
from megatron.fill.runtime.baton import Baton
from megatron.fill.runtime.estimate import NodeEstimators
from megatron.fill.runtime.steplog import StepLog, WorkerPhase
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.types import BubbleUse, Lack

_PROBE_AFTER = 32  # bubbles without a step before one is tried all the same


class StepLoop:
    """Runs one task's steps in the bubbles of one gate.

    Args:
        machine: the task, in state PAUSED.
        stopping: tells between steps whether the worker was asked to stop.
        between: called after every bubble, outside of it: checkpoints are due there.
        baton: passed on in each bubble when the next step does not fit any more; None if nobody waits for it.
        control: asked immediately before every step; None where nobody can pause.
        launch: called before every step; what it says is undone by ``land``.
        settle: returns when all that a step has begun on the device has ended; only then has the step.
        land: called after every step, once the time of its end is known.
        breather_ns: beyond a bubble's deadline the next step waits for so long: where the main job needs the device
            itself, and that in several short turns, to find that its wait is over.
        preempted: the main job takes the device back with the end of a bubble, so a step or a pause that is caught by
            it says nothing of how long it takes.
    """

    def __init__(
        self,
        machine: TaskMachine,
        gate: GateReader,
        log: StepLog,
        stopping: Callable[[], bool],
        clock: Callable[[], int] = time.monotonic_ns,
        between: Callable[[], None] | None = None,
        baton: Baton | None = None,
        control: RunSwitch | None = None,
        launch: Callable[[], None] = lambda: None,
        settle: Callable[[], None] = lambda: None,
        land: Callable[[], None] = lambda: None,
        breather_ns: int = 0,
        preempted: bool = False,
    ) -> None:
        self.machine = machine
        self.gate = gate
        self.log = log
        self.stopping = stopping
        self.clock = clock
        self.between = between
        self.baton = baton
        self.control = control or AlwaysRunning()
        self.launch = launch
        self.settle = settle
        self.land = land
        self.breather_ns = breather_ns
        self.preempted = preempted
        self.attend: Callable[[], None] | None = None  # called between bubbles, and when a signal asks to look around
        self.hold_at_start = False  # begin no new iteration: the configuration is about to change
        self.estimators = NodeEstimators()
        self._extra_bytes: Sequence[int] = ()
        self._shares: Sequence[float] = ()  # of an iteration's work, by node
        self._pause_ns = 0
        self._skipped = 0
        self._last_end_ns = 0  # of a step

    def expect(self, profile: JobProfile) -> None:
        """What is known of the task's nodes: how long each takes, and the memory it needs."""
        nodes = profile.nodes
        self.estimators.expect([node.duration_ns for node in nodes])
        least = min(node.memory_bytes for node in nodes)  # what the task holds anyway
        self._extra_bytes = [node.memory_bytes - least for node in nodes]
        whole_ns = max(1, profile.duration_ns)
        self._shares = [profile.work * node.duration_ns / whole_ns for node in nodes]

    def run(self) -> bool:
        """Go on until the task is finished (True), or the main job is over or a stop was asked for (False)."""
        if self.baton is not None:
            self.baton.hold()
        self.log.serving_ns = self.clock()
        try:
            return self._serve()
        finally:
            if self.baton is not None:
                self.baton.drop()

    def _serve(self) -> bool:
        seq = 0
        while not (self.gate.ended or self.stopping()):
            if self.attend is not None:
                self.attend()
            bubble = self.gate.wait(seq)
            if bubble is not None:
                seq = bubble.seq
                finished = self.fill(bubble)
                if self.baton is not None:
                    self.baton.pass_on(seq)
                if finished:
                    return True
                if self.between is not None:
                    self.between()
        return False

    def fill(self, bubble: OpenBubble) -> bool:
        """Use one open bubble; whether the task finished in it."""
        now_ns = self.clock()
        if not (self.control.running and self._may_run(bubble)):
            self._skip(bubble, now_ns)
            return False
        if not self._await_start(bubble):
            self._skip(bubble, now_ns)
            return False
        if not self._fits(bubble, self.clock()):
            self._skipped += 1
            if self._skipped < _PROBE_AFTER:
                self._skip(bubble, now_ns)
                return False
            # The estimate may stem from a few slow steps only; without a try it could never be corrected.
        self._skipped = 0
        log = self.log
        # A step that was caught by the end of an earlier bubble may have gone on into this one.
        carried_ns = max(0, self._last_end_ns - bubble.opened_ns)
        log.enter_bubble(bubble.seq)
        log.phase = WorkerPhase.START
        self.machine.start()
        finished, first_ns, last_ns, spent_ns, steps = self._steps(bubble)
        log.phase = WorkerPhase.PAUSE
        before_ns = self.clock()
        self.machine.pause()
        now_ns = self.clock()
        if not self.preempted or self.gate.is_open(bubble.seq):
            self._pause_ns = now_ns - before_ns
        closed_ns = self.gate.closed_ns(bubble.seq)
        overrun_ns = max(0, last_ns - closed_ns) if closed_ns is not None and steps else 0
        latency_ns = first_ns - bubble.opened_ns if steps and not carried_ns else -1
        harvested_ns = carried_ns + max(0, spent_ns - overrun_ns)
        lack = self._lack(bubble, finished)
        use = BubbleUse(bubble.seq, latency_ns, harvested_ns, overrun_ns, steps, now_ns, lack)
        log.leave_bubble(use, bubble.alone)
        self._last_end_ns = max(self._last_end_ns, last_ns)
        log.phase = WorkerPhase.ASLEEP
        return finished

    def _skip(self, bubble: OpenBubble, now_ns: int) -> None:
        self.log.skip_bubble(bubble.seq, now_ns, self._lack(bubble), bubble.alone)

    def _lack(self, bubble: OpenBubble, finished: bool = False) -> Lack:
        """Why no further step is begun in it."""
        if finished or not self.control.running or self._held_back or self.stopping():
            return Lack.JOB
        return Lack.TIME if self._has_room(bubble) else Lack.MEMORY

    def _steps(self, bubble: OpenBubble) -> tuple[bool, int, int, int, int]:
        log, clock, machine, control = self.log, self.clock, self.machine, self.control
        log.phase = WorkerPhase.STEP
        first_ns = end_ns = spent_ns = steps = 0
        while control.running:
            node = machine.task.next_node
            self.launch()
            start_ns = clock()
            try:
                work = machine.run_next_step()
            except StopIteration:
                return True, first_ns, end_ns, spent_ns, steps
            finally:
                self.settle()
                ended_ns = clock()
                self.land()
            end_ns = ended_ns
            is_open = self.gate.is_open(bubble.seq)
            if is_open or not self.preempted:
                self.estimators.observe(node, end_ns - start_ns)
            counts, partial = self._credit(node, work)
            log.step_ended(start_ns, end_ns, counts, bubble.alone, partial)
            first_ns = first_ns or start_ns
            spent_ns += end_ns - start_ns
            steps += 1
            now_ns = clock()
            if self.breather_ns and is_open and now_ns > bubble.deadline_ns:
                self.gate.wait_change(bubble.seq, self.breather_ns)
                is_open, now_ns = self.gate.is_open(bubble.seq), clock()
            if not (is_open and self._fits(bubble, now_ns) and self._may_run(bubble)) or self.stopping():
                break
        return False, first_ns, end_ns, spent_ns, steps

    def _credit(self, node: int, work: float) -> tuple[float, float]:
        """The work that counts for good, and that of the iteration that has not ended.

        A node counts as its share of an iteration until the iteration's last one says what it really did.  So half an
        iteration counts as half of its work, and whole ones exactly: shares are never added to what counts for good.
        """
        if work or node >= len(self._shares):
            return work, 0.0
        begun = self.log.partial_work if node else 0.0  # whatever was counted of an earlier iteration is void
        return 0.0, begun + self._shares[node]

    def _await_start(self, bubble: OpenBubble) -> bool:
        """Sleep until the first step may begin; whether the bubble is still open."""
        begin_ns, _ = bubble.window(self.estimators.estimate_ns(self.machine.task.next_node))
        left_ns = begin_ns - self.clock()
        if left_ns > 0:
            self.gate.wait_change(bubble.seq, left_ns)
        return self.gate.is_open(bubble.seq)

    def _fits(self, bubble: OpenBubble, now_ns: int) -> bool:
        estimate_ns = self.estimators.estimate_ns(self.machine.task.next_node)
        begin_ns, end_ns = bubble.window(estimate_ns)
        return begin_ns <= now_ns and now_ns + estimate_ns + self._pause_ns <= end_ns

    def _may_run(self, bubble: OpenBubble) -> bool:
        return not self._held_back and self._has_room(bubble)

    @property
    def _held_back(self) -> bool:
        return self.hold_at_start and self.machine.task.next_node == 0

    def _has_room(self, bubble: OpenBubble) -> bool:
        node = self.machine.task.next_node
        return bubble.alone or node >= len(self._extra_bytes) or self._extra_bytes[node] <= bubble.free_bytes
