"""The inside of a worker: run steps while the next one fits, then sleep (FreeRide, section 4.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megatron.fill.pages.baton import Baton
from megatron.fill.pages.control import AlwaysRunning, RunSwitch
from megatron.fill.pages.gate import GateReader, OpenBubble
from megatron.fill.pages.phases import WorkerPhase
from megatron.fill.pages.steplog import StepLog
from megatron.fill.profiles import JobProfile
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.types import BubbleUse, Lack
from megatron.fill.worker.estimate import NodeEstimators
from megatron.fill.worker.pacing import Pacer, Turn

_PROBE_AT_MOST = 1024  # where it does not fit: twice as many each time, up to here


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
        breather_ns: how long to wait after each step beyond the deadline, so that a main job that needs the device in
            several short turns can find that its wait is over.
        preemptive: the main job takes the device back with the end of a bubble, so a step or a pause that is caught by
            it says nothing of how long it takes.
        pacer: where the device does not preempt: holds steps of which nobody knows that they fit; None elsewhere.
        probe_after: bubbles without a step before one is tried all the same.
        patience: how many times ``probe_after`` to wait where no long bubble comes.
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
        preemptive: bool = False,
        pacer: Pacer | None = None,
        probe_after: int = 32,
        patience: int = 4,
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
        self.preemptive = preemptive
        self.pacer = pacer
        self.probe_after = probe_after
        self.patience = patience
        self.attend: Callable[[], None] | None = None  # called between bubbles, and when a signal asks to look around
        self.hold_at_start = False  # begin no new iteration: the configuration is about to change
        self.estimators = NodeEstimators()
        self._extra_bytes: Sequence[int] = ()
        self._shares: Sequence[float] = ()  # of an iteration's work, by node
        self._pause_ns = 0
        self._skipped = 0
        self._probe_after = self.probe_after
        self._probing = False
        self._latest_ns = 0  # how long the latest step took
        self._last_end_ns = 0  # of a step

    def expect(self, profile: JobProfile) -> None:
        """What is known of the task's nodes: how long each takes, and the memory it needs."""
        nodes = profile.nodes
        self.estimators.expect([node.duration_ns for node in nodes])
        least = min(node.memory_bytes for node in nodes)  # what the task holds anyway
        self._extra_bytes = [node.memory_bytes - least for node in nodes]
        whole_ns = max(1, profile.duration_ns)
        self._shares = [profile.work * node.duration_ns / whole_ns for node in nodes]

    def expect_steps(self, profile: JobProfile) -> None:
        """What is known of a plain task: how long each kind of its steps takes."""
        self.estimators.expect([node.duration_ns for node in profile.nodes])

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
                if self.baton is not None and self.gate.is_open(seq):  # a step that was held is in a later one
                    self.baton.pass_on(seq)
                if finished:
                    return True
                if self.between is not None:
                    self.between()
        return False

    def fill(self, bubble: OpenBubble) -> bool:
        """Use one open bubble; whether the task finished in it."""
        now_ns = self.clock()
        if self.pacer is not None:
            self.pacer.see(bubble)
        if not (self.control.running and self._may_run(bubble)):
            self._skip(bubble, now_ns)
            return False
        if not self._await_start(bubble):
            self._skip(bubble, now_ns)
            return False
        self._probing = not self._fits(bubble, self.clock())
        if self._probing:
            self._skipped += 1
            if not self._may_probe(bubble):
                self._skip(bubble, now_ns)
                return False
        else:
            self._probe_after = self.probe_after
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
        if not self.preemptive or self.gate.is_open(bubble.seq):
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

    def _may_probe(self, bubble: OpenBubble) -> bool:
        """Whether to try a step that does not fit, by an estimate that may stem from a few slow steps only.

        Without a try it could never be corrected.
        """
        if self._skipped < self._probe_after:
            return False
        patient = self._skipped < self.patience * self._probe_after
        return not patient or self.pacer is None or self.pacer.is_long(bubble, self.clock())

    def _skip(self, bubble: OpenBubble, now_ns: int) -> None:
        self.log.skip_bubble(bubble.seq, now_ns, self._lack(bubble), bubble.alone)

    def _lack(self, bubble: OpenBubble, finished: bool = False) -> Lack:
        """Why no further step is begun in it."""
        if finished or self.machine.task.idle or not self.control.running or self._held_back or self.stopping():
            return Lack.JOB
        return Lack.TIME if self._has_room(bubble) else Lack.MEMORY

    def _steps(self, bubble: OpenBubble) -> tuple[bool, int, int, int, int]:
        log, clock, machine, control = self.log, self.clock, self.machine, self.control
        log.phase = WorkerPhase.STEP
        first_ns = end_ns = spent_ns = steps = 0
        while control.running:
            node = machine.task.next_node
            held: Turn | None = None
            self.launch()
            start_ns = clock()
            try:
                if self.pacer is not None and self._is_doubtful(node):
                    with self.pacer.paced(bubble) as held:
                        work = machine.run_next_step()
                else:
                    work = machine.run_next_step()
            except StopIteration:
                return True, first_ns, end_ns, spent_ns, steps
            finally:
                self.settle()
                ended_ns = clock()
                self.land()
            end_ns, took_ns = ended_ns, ended_ns - start_ns
            if held is not None and held.first_held_ns:
                end_ns = held.first_held_ns  # of this bubble; the rest was in others
                took_ns -= held.held_ns
                self._probe_after = min(_PROBE_AT_MOST, 2 * self._probe_after)
            self._probing = False
            self._latest_ns = took_ns
            is_open = self.gate.is_open(bubble.seq)
            if is_open or not self.preemptive:
                self.estimators.observe(node, took_ns)
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
            if machine.task.idle:
                break
        return False, first_ns, end_ns, spent_ns, steps

    def _is_doubtful(self, node: int) -> bool:
        """Whether nobody knows that the next step fits: the first one of a kind loads what it needs."""
        return self._probing or not self.estimators.has_seen(node)

    def _credit(self, node: int, work: float) -> tuple[float, float]:
        """The work that counts for good, and that of the iteration that has not ended.

        A node counts as its share of an iteration until the iteration's last one says what it really did.  So half an
        iteration counts as half of its work, and whole ones exactly: shares are never added to what counts for good.
        """
        if work or node >= len(self._shares):
            return work, 0.0
        begun = self.log.partial_work if node else 0.0  # whatever was counted of an earlier iteration is void
        return 0.0, begun + (0.0 if self.machine.task.idle else self._shares[node])

    def _await_start(self, bubble: OpenBubble) -> bool:
        """Sleep until the first step may begin; whether the bubble is still open."""
        begin_ns, _ = bubble.window(self.estimators.estimate_ns(self.machine.task.next_node))
        while (left_ns := begin_ns - self.clock()) > 0 and self.gate.is_open(bubble.seq):
            if not self._may_run(bubble) or self.stopping():
                break
            self.gate.wait_change(bubble.seq, left_ns)
        return self.gate.is_open(bubble.seq)

    def _fits(self, bubble: OpenBubble, now_ns: int) -> bool:
        estimate_ns = self.estimators.estimate_ns(self.machine.task.next_node)
        if self.pacer is not None and not estimate_ns:
            # Such a step is held when the bubble ends, as far as it can be.
            soon = self._latest_ns > 0 and now_ns + 2 * self._latest_ns + self._pause_ns <= bubble.deadline_ns
            return soon or self.pacer.is_long(bubble, now_ns)
        return bubble.fits(estimate_ns, now_ns, self._pause_ns)

    def _may_run(self, bubble: OpenBubble) -> bool:
        return not self._held_back and self._has_room(bubble)

    @property
    def _held_back(self) -> bool:
        return self.hold_at_start and self.machine.task.next_node == 0

    def _has_room(self, bubble: OpenBubble) -> bool:
        node = self.machine.task.next_node
        return bubble.alone or node >= len(self._extra_bytes) or self._extra_bytes[node] <= bubble.free_bytes
