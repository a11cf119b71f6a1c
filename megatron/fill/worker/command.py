"""A command as a worker's job: it runs while a bubble is open, and is stopped (SIGSTOP) outside."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron.fill.linux import host
from megatron.fill.pages.control import ControlReader
from megatron.fill.pages.gate import OpenBubble
from megatron.fill.pages.steplog import WorkerPhase
from megatron.fill.pages.watcher import watch_control
from megatron.fill.sandbox.process import SandboxedProcess
from megatron.fill.sidetask.imperative import NOT_FOUND, become_command, why_no_program
from megatron.fill.status import Cause, Then
from megatron.fill.types import BubbleUse, Lack
from megatron.fill.worker.pacing import StepPages
from megatron.fill.worker.spec import Outcome, WorkerSpec

_GUARD_NS = 500_000  # time before the bubble's expected end at which a command is stopped
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)  # the command itself, or a program that its shell had started
_LOOK_NS = 50_000_000  # limit of a wait for the bubble's end, since the other job may requeue this futex wait
_STOPS_S = 0.005  # limit of a wait for the command to stop; ``pipefill profile`` reports it as the time of a pause
_HEARD_S = 0.5  # limit of a wait for our own SIGTERM, since a batch system signals one process after the other


@dataclass(eq=False, repr=False)
class CommandRun:
    """Runs one command to its end, or until the training is over."""

    spec: WorkerSpec
    # Starts the command's process in its sandbox, once the agent agrees (``worker.start_sandboxed``).
    start: Callable[[Callable[[], None]], SandboxedProcess]
    pages: StepPages
    control: ControlReader  # the control page; a pause takes effect within a bubble too
    stopping: Callable[[], bool]  # returns True once the worker was asked to stop

    def __post_init__(self) -> None:
        self.gate, self.log = self.pages.gate, self.pages.log
        self._cut_ns = 0  # time at which an operator's pause last stopped the command
        self._lock = threading.Lock()  # makes reading the control page and acting on it atomic

    def run(self) -> Outcome:
        if self.pages.baton is not None:
            self.pages.baton.hold()
        self.log.unit = "seconds"
        # This process only watches the clock, and must get the core when the bubble ends: it runs at normal priority,
        # while the command itself yields to the training.
        command = self.start(lambda: become_command(self.spec.work.command or ()))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the command's end interrupts the wait
        # The command stops itself, at idle priority: continued before that, it would be stopped for the whole bubble.
        while not (command.await_stop(0.1, every_s=0.005) or self.gate.ended or self.stopping()):
            pass
        # This thread sleeps on the gate within a bubble, so another one sleeps on the control page.  It is started
        # after the fork above, which does not copy threads.
        watch_control(self.control, lambda state: self._cut(command))
        try:
            code = self._run_in_bubbles(command)
        finally:
            command.kill()
        if code is None or self._was_told_to_end(code):
            return Outcome(Cause.STOPPED, then=Then.COMMAND_RESTARTS, unit="seconds")
        if code == 0:
            return Outcome(Cause.FINISHED, unit="seconds")
        program = (self.spec.work.command or ("",))[0]
        if code == NOT_FOUND and shutil.which(program, path=self.spec.env.get("PATH")) is None:
            return Outcome(Cause.FAILED, why_no_program(program), unit="seconds")
        return Outcome(Cause.FAILED, f"the command {host.how_ended(code)}; see its output", unit="seconds")

    def _was_told_to_end(self, code: int) -> bool:
        """True if the command was ended together with this process (``scancel``), and not by itself."""
        end_s = time.monotonic() + _HEARD_S
        while code in _TERMINATED and not self.stopping() and time.monotonic() < end_s:
            time.sleep(0.01)
        return code in _TERMINATED and self.stopping()

    def _cut(self, command: SandboxedProcess) -> None:
        with self._lock:
            if not self.control.running and command.poll() is None:
                command.signal(signal.SIGSTOP)
                self._cut_ns = time.monotonic_ns()

    def _run_in_bubbles(self, command: SandboxedProcess) -> int | None:
        seq = 0
        self.log.phase = WorkerPhase.ASLEEP
        self.log.ready_ns = self.log.serving_ns = time.monotonic_ns()
        while not (self.gate.ended or self.stopping()):
            bubble = self.gate.wait(seq)
            if bubble is None:
                continue
            seq = bubble.seq
            self._fill(command, bubble)
            if self.pages.baton is not None:
                self.pages.baton.pass_on(seq)
            command.await_stop(_STOPS_S)
            self.log.phase = WorkerPhase.ASLEEP
            if (code := command.poll()) is not None:
                return code
        return None

    def _fill(self, command: SandboxedProcess, bubble: OpenBubble) -> None:
        """Let the command run in each stretch of an open bubble in which no end is likely, and stop it in between."""
        log, seq = self.log, bubble.seq
        latency_ns, harvested_ns, overrun_ns, held_ns, stretches = -1, 0, 0, 0, 0
        now_ns = time.monotonic_ns()
        while self._may_go_on(seq, command):
            begin_ns, end_ns = self._stretch(bubble, now_ns)
            if end_ns <= max(begin_ns, now_ns):
                break
            if begin_ns > now_ns:
                self._wait(seq, begin_ns, command)
                before_ns, now_ns = now_ns, time.monotonic_ns()
                held_ns += now_ns - before_ns
                continue
            if not stretches:
                latency_ns = now_ns - bubble.opened_ns - held_ns
            log.step_seq = seq
            log.phase = WorkerPhase.STEP
            with self._lock:
                if self.control.running:
                    command.signal(signal.SIGCONT)
            self._wait(seq, end_ns, command)
            log.phase = WorkerPhase.PAUSE
            command.signal(signal.SIGSTOP)
            log.step_seq = 0
            start_ns, now_ns = now_ns, time.monotonic_ns()
            ended_ns = self._cut_ns if self._cut_ns > start_ns else now_ns
            log.step_ended(start_ns, ended_ns, (ended_ns - start_ns) / 1e9, bubble.alone)
            overrun_ns = max(0, ended_ns - (self.gate.closed_ns(seq) or ended_ns))
            harvested_ns += ended_ns - start_ns - overrun_ns
            stretches += 1
        ends = command.poll() is not None or self.stopping() or not self.control.running
        lack = Lack.JOB if ends else Lack.TIME
        use = BubbleUse(seq, latency_ns, harvested_ns, overrun_ns, stretches, now_ns, lack, held_ns)
        log.leave_bubble(use, bubble.alone)

    def _stretch(self, bubble: OpenBubble, now_ns: int) -> tuple[int, int]:
        """Return the beginning of the next stretch for the command, and the time at which it is stopped again."""
        if self.spec.device != "cpu":  # work that a stopped command has launched on a GPU runs on for an unknown time
            return bubble.opened_ns, bubble.deadline_ns - _GUARD_NS
        begin_ns, end_ns = bubble.window(_GUARD_NS, now_ns)
        return begin_ns, end_ns - _GUARD_NS

    def _wait(self, seq: int, until_ns: int, command: SandboxedProcess) -> None:
        while self._may_go_on(seq, command) and (left_ns := until_ns - time.monotonic_ns()) > 0:
            self.gate.wait_change(seq, min(left_ns, _LOOK_NS))

    def _may_go_on(self, seq: int, command: SandboxedProcess) -> bool:
        return self.gate.is_open(seq) and self.control.running and not self.stopping() and command.poll() is None
