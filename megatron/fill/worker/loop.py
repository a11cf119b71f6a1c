"""The worker's main loop: run steps while the next one fits, then sleep (FreeRide, section 4.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.fill.pages.gate import OpenBubble
from megatron.fill.pages.steplog import WorkerPhase
from megatron.fill.profiles import JobProfile
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.types import BubbleUse, Lack
from megatron.fill.worker.estimate import NodeEstimators
from megatron.fill.worker.pacing import PLAIN, Pacer, StepDevice, StepPages, TakesTurn, Turn, at_once

_PROBE_AT_MOST = 1024  # limit of ``probe_after``, which doubles after each probe that did not fit


@dataclass(eq=False, repr=False)
class StepLoop:
    """Runs one task's steps in the bubbles of one gate."""

    machine: TaskMachine  # in state PAUSED
    pages: StepPages
    stopping: Callable[[], bool]  # called between steps
    device: StepDevice = PLAIN
    pacer: Pacer | None = None  # holds steps of unknown duration on a device that does not preempt
    probe_after: int = 32  # number of bubbles without a step after which one is tried that does not fit by its estimate
    # The same while the estimate is of one step only: the first loads kernels, and may have taken many times as long as
    # the others will.
    first_after: int = 4
    patience: int = 4  # factor on ``probe_after`` after which a step is tried in a bubble that is not long, too
    clock: Callable[[], int] = time.monotonic_ns

    def __post_init__(self) -> None:
        pages = self.pages
        self.gate, self.log, self.baton, self.control = pages.gate, pages.log, pages.baton, pages.control
        self.between: Callable[[], None] = lambda: None  # called after every bubble, outside of it
        self.attend: Callable[[], None] = lambda: None  # called between bubbles, and after a signal from the agent
        self.hold_at_start = False  # begin no new iteration, since the configuration is about to change
        self.estimators = NodeEstimators()
        self._extra_bytes: Sequence[int] = ()
        self._shares: Sequence[float] = ()  # part of an iteration's work, by node
        self._pause_ns = 0
        self._held_ns = 0  # in the present bubble, as in ``BubbleUse``
        self._skipped = 0
        self._probe_after = self.probe_after
        self._probing = False
        self._latest_ns = 0  # duration of the latest step
        self._last_end_ns = 0  # end of the latest step

    @property
    def turn(self) -> TakesTurn:
        """The context manager in which the task uses the device between its steps."""
        return at_once if self.pacer is None else self.pacer.turn

    def expect(self, profile: JobProfile) -> None:
        nodes = profile.nodes
        self.estimators.expect([node.duration_ns for node in nodes])
        least = min(node.memory_bytes for node in nodes)  # held by the task in any case
        self._extra_bytes = [node.memory_bytes - least for node in nodes]
        whole_ns = max(1, profile.duration_ns)
        self._shares = [profile.work * node.duration_ns / whole_ns for node in nodes]

    def run(self) -> bool:
        """Run steps until the task is finished (True), or the training is over or a stop was requested (False)."""
        if self.baton is not None:
            self.baton.hold()
        if not self.machine.task.context.measuring:
            self.log.serving_ns = self.clock()
        seq = 0
        try:
            while not (self.gate.ended or self.stopping()):
                self.attend()
                bubble = self.gate.wait(seq)
                if bubble is None:
                    continue
                seq = bubble.seq
                finished = self.fill(bubble)
                if self.baton is not None and self.gate.is_open(seq):  # not open if a held step ended in a later bubble
                    self.baton.pass_on(seq)
                if finished:
                    return True
                self.between()
            return False
        finally:
            if self.baton is not None:
                self.baton.drop()

    def fill(self, bubble: OpenBubble) -> bool:
        """Use one open bubble; True if the task finished in it."""
        self._held_ns = 0
        if self.pacer is not None:
            self.pacer.see(bubble)
        if not (self.control.running and self._may_run(bubble) and self._await_start(bubble)):
            self._skip(bubble)
            return False
        held_before_ns = self._held_ns
        self._probing = not self._fits(bubble, self.clock())
        if self._probing:
            self._skipped += 1
            if self._held_ns or not self._may_probe(bubble):  # a step that was held back has a time, and was a bit late
                self._skip(bubble)
                return False
        else:
            self._probe_after = self.probe_after
        self._skipped = 0
        log = self.log
        # A step that an earlier bubble's end interrupted may have continued into this one.
        carried_ns = max(0, self._last_end_ns - bubble.opened_ns)
        log.step_seq = bubble.seq
        log.phase = WorkerPhase.START
        self.machine.start()
        finished, first_ns, last_ns, spent_ns, steps = self._steps(bubble)
        log.phase = WorkerPhase.PAUSE
        before_ns = self.clock()
        self.machine.pause()
        now_ns = self.clock()
        if not self.device.preemptive or self.gate.is_open(bubble.seq):
            self._pause_ns = now_ns - before_ns
        closed_ns = self.gate.closed_ns(bubble.seq)
        overrun_ns = max(0, last_ns - closed_ns) if closed_ns is not None and steps else 0
        latency_ns = first_ns - bubble.opened_ns - held_before_ns if steps and not carried_ns else -1
        harvested_ns = carried_ns + max(0, spent_ns - overrun_ns)
        lack = self._lack(bubble, finished)
        use = BubbleUse(bubble.seq, latency_ns, harvested_ns, overrun_ns, steps, now_ns, lack, self._held_ns)
        log.leave_bubble(use, bubble.alone)
        if overrun_ns and self.device.preemptive:
            for seq, length_ns in self.gate.over_since(bubble.seq, last_ns):
                # A whole bubble in which the step went on that the end of this one had interrupted.
                log.leave_bubble(BubbleUse(seq, -1, length_ns, 0, 0, now_ns), bubble.alone)
        self._last_end_ns = max(self._last_end_ns, last_ns)
        log.phase = WorkerPhase.ASLEEP
        return finished

    def _may_probe(self, bubble: OpenBubble) -> bool:
        """True if a step that does not fit by its estimate is to be tried anyway.

        The estimate may come from a few slow steps, and could not be corrected without a try.
        """
        after = self._probe_after
        if self.estimators.seen_once(self.machine.task.next_node):
            after = min(after, self.first_after)
        if self._skipped < after:
            return False
        patient = self._skipped < self.patience * after
        return not patient or self.pacer is None or self.pacer.is_long(bubble, self.clock())

    def _skip(self, bubble: OpenBubble) -> None:
        use = BubbleUse(bubble.seq, -1, 0, 0, 0, self.clock(), self._lack(bubble), self._held_ns)
        self.log.leave_bubble(use, bubble.alone)

    def _lack(self, bubble: OpenBubble, finished: bool = False) -> Lack:
        if finished or self.machine.task.idle or not self.control.running or self._held_back or self.stopping():
            return Lack.JOB
        return Lack.TIME if self._has_room(bubble) else Lack.MEMORY

    def _steps(self, bubble: OpenBubble) -> tuple[bool, int, int, int, int]:
        log, clock, machine, control, device = self.log, self.clock, self.machine, self.control, self.device
        log.phase = WorkerPhase.STEP
        first_ns = end_ns = spent_ns = steps = 0
        while control.running:
            node = machine.task.next_node
            held: Turn | None = None
            device.launch()
            start_ns = clock()
            try:
                # A probe, and the first step of its kind, which loads more, may take longer than the bubble.
                if self.pacer is not None and (self._probing or not self.estimators.has_seen(node)):
                    with self.pacer.paced(bubble) as held:
                        work = machine.run_next_step()
                else:
                    work = machine.run_next_step()
            except StopIteration:
                return True, first_ns, end_ns, spent_ns, steps
            finally:
                device.synchronize()
                ended_ns = clock()
                device.land()
            end_ns, took_ns = ended_ns, ended_ns - start_ns
            if held is not None and held.first_held_ns:
                end_ns = held.first_held_ns  # the end of its part in this bubble; the rest was in others
                took_ns -= held.held_ns
                self._probe_after = min(_PROBE_AT_MOST, 2 * self._probe_after)
            self._probing = False
            self._latest_ns = took_ns
            is_open = self.gate.is_open(bubble.seq)
            if is_open or not device.preemptive:
                self.estimators.observe(node, took_ns)
            counts, partial = self._credit(node, work)
            log.step_ended(start_ns, end_ns, counts, bubble.alone, partial)
            first_ns = first_ns or start_ns
            spent_ns += end_ns - start_ns
            steps += 1
            now_ns = clock()
            if not (is_open and self._may_run(bubble)) or self.stopping() or machine.task.idle:
                break
            # While this waits, the baton is not passed on: the tail job would need the device when this one goes on.
            if not (self._fits(bubble, now_ns) or (self._await_start(bubble) and self._fits(bubble, clock()))):
                break
        return False, first_ns, end_ns, spent_ns, steps

    def _credit(self, node: int, work: float) -> tuple[float, float]:
        """Return the work that counts permanently, and that of the iteration that has not ended.

        A node counts as its share of an iteration until the iteration's last node returns the actual work.  So half an
        iteration counts as half of its work, and complete ones count exactly: shares are never added permanently.
        """
        if work or node >= len(self._shares):
            return work, 0.0
        begun = self.log.partial_work if node else 0.0  # a new iteration: shares of the one before no longer count
        stays = self.machine.task.idle or self.machine.task.next_node == node  # such as at the end of the data
        return 0.0, begun + (0.0 if stays else self._shares[node])

    def _await_start(self, bubble: OpenBubble) -> bool:
        """Sleep until the next step may begin; True if the bubble is still open."""
        now_ns = self.clock()
        step_ns = self.estimators.estimate_ns(self.machine.task.next_node)
        begin_ns, _ = bubble.window(step_ns, now_ns, self._pause_ns)
        if begin_ns <= now_ns:
            return self.gate.is_open(bubble.seq)
        while (left_ns := begin_ns - self.clock()) > 0 and self.gate.is_open(bubble.seq):
            if not (self.control.running and self._may_run(bubble)) or self.stopping():
                break
            self.gate.wait_change(bubble.seq, left_ns)
        self._held_ns += self.clock() - now_ns
        return self.gate.is_open(bubble.seq)

    def _fits(self, bubble: OpenBubble, now_ns: int) -> bool:
        estimate_ns = self.estimators.estimate_ns(self.machine.task.next_node)
        if self.pacer is not None and not estimate_ns:
            # The pacer holds such a step when the bubble ends, as far as possible.
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
