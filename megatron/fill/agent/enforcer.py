"""Enforcement of bubbles: a worker that runs outside them is paused, and ended if it does so too often or too long."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.fill.agent.ending import Ending, How
from megatron.fill.linux.proc import state_in, waited_ns_in
from megatron.fill.pages.gate import SharedGateReader
from megatron.fill.pages.steplog import StepLog
from megatron.fill.status import Cause

_LOOK_S = 0.2  # between two looks while no step is overdue
_SOON_S = 0.02  # between two looks while one is
_SOON_NS = int(_SOON_S * 1e9)
_SCHEDULED = 2  # kernel's CPUCLOCK_SCHED: with a pid it makes the id of the clock of that process's CPU time
_ASLEEP = set("SDIZX")  # states in /proc/PID/stat; not T, since a stopped process could not have run
_ALLOWANCE_S = 30.0  # CPU time in advance: to import a large model's libraries and to build it
_SHARE = 0.05  # CPU time granted per second that passes
_LAST_S = 3.0  # debt at which the worker is ended; stopped outside bubbles, it cannot come to that


@dataclass(frozen=True, slots=True)
class _Core:
    """A process's use of the cores so far, summed over its threads."""

    ran_ns: int = 0  # CPU time
    waited_ns: int = 0  # time that its threads waited for a core, without a wait that has not ended yet
    sleeps: bool = False  # no thread runs or is ready to run


@dataclass(eq=False, repr=False)
class Enforcer:
    """Watches one worker (Watcher).

    If a step is still in flight ``grace_ns`` after the end of its bubble, its process group is stopped, and continued
    only while bubbles are open, until the step ends.  The *opportunity* of a step is the time after its bubble in which
    it was neither stopped nor waiting for a core that the training had.  A step whose opportunity exceeds the grace
    period is a violation; one that does not end soon after that hangs.

    A worker that has used up its overtime is also continued only while bubbles are open.  No worker runs while filling
    is off.

    The thread that watches the worker calls all methods.  A second thread lets the worker run in bubbles only: it reads
    the attributes set here, and writes ``violations``, ``ending`` and the opportunity of the step.
    """

    pid: int  # the worker's process and process group, which it cannot leave
    gate: SharedGateReader
    log: StepLog
    grace_ns: int
    max_overruns: int  # number of violations (steps, starts or pauses) at which the worker is ended
    overtime: Overtime  # account of the worker's CPU time outside bubbles
    off: Callable[[], bool] = lambda: False  # returns True while no worker may run: operator or brake pause them
    waits: bool = True  # it waits for bubbles by itself; False for a command, whose worker's first process does
    hung_ns: int = 800_000_000  # time that a step has to end, in further bubbles, once it has used up its grace period

    def __post_init__(self) -> None:
        self.violations = 0  # number of violations so far
        self.ending: Ending | None = None  # the decision to end the worker; None while it may go on
        self._overdue: int | None = None  # the bubble that has ended, and that it has not left
        self._overdue_in = ""  # the overdue callback, which may have returned when it is charged
        self._looked_ns, self._core = 0, _Core()  # time of the latest sample of the worker, and the sample
        self._opportunity_ns = self._hangs_at_ns = 0
        self._blamed: list[str] = []  # the callbacks with violations, each once
        self._rationing: threading.Thread | None = None
        self._held = False  # stopped because no worker may run
        self._over = self._gone = False

    def check(self) -> float:
        """Check the worker once, and return the seconds until the next check is due."""
        now_ns = time.monotonic_ns()
        if self.ending or self._over or self._hold():
            return _LOOK_S
        if self._rationing is not None and self._rationing.is_alive():
            if self._hangs_at_ns and now_ns >= self._hangs_at_ns and self._opportunity_ns >= self.grace_ns:
                late_s = self._opportunity_ns / 1e9
                self._fail(Cause.HUNG, f"{self._overdue_in} hung: it went on for {late_s:.2g} s after its bubble")
            return _SOON_S
        # Read first: a step that is in flight below was already in flight here.
        callback = self.log.phase.callback if self.waits else "the command"
        # The step's number does not matter: only one step can run after its bubble, whatever the log's counts are.
        seq = self.log.step_seq
        ended_ns = self._ended_ns(seq) if seq else None
        if ended_ns is None:
            self._overdue, self._core = None, self._sample()
            if self.overtime.overdrawn:
                self._hangs_at_ns = 0  # a stopped step is not a hang
                self._ration(lambda: self.overtime.overdrawn)
            else:
                self._let_go()  # another process may have stopped it: it must not block its seat
            return _LOOK_S
        if self._overdue != seq:
            self._overdue, self._opportunity_ns, self._looked_ns = seq, 0, ended_ns
            # CPU time since the bubble's end is unknown and counts from now on; waiting counts from the last sample on.
            self._core = replace(self._sample(), waited_ns=self._core.waited_ns)
        self._look(now_ns)
        left_ns = self.grace_ns - (now_ns - ended_ns)
        if left_ns < 0:
            bubble = self.gate.current()  # the next one may be open already, and be a long one
            self._hangs_at_ns = self.hung_ns + (now_ns if bubble is None else max(now_ns, bubble.deadline_ns))
            self._overdue_in = callback
            self._ration(lambda: self.log.step_seq == seq, self._charge)
            return _SOON_S
        return min(_LOOK_S, max(_SOON_S, left_ns / 1e9))

    def look(self) -> Ending | None:
        """Update the account of work outside bubbles, and return the decision to end the worker, if there is one."""
        if not self._over:
            self.overtime.look()
            if self.overtime.exceeded_s:
                self._fail(Cause.OVERTIME, f"{self.overtime.exceeded_s:g}")
        return self.ending

    def release(self) -> None:
        """Stop watching and let the worker run, so that it can end; a command is ended where it is."""
        self._over = True
        self._let_go()

    def close(self) -> None:
        """Send no more signals: the worker has ended, and the kernel may reuse its pid."""
        self._over = self._gone = True

    def _hold(self) -> bool:
        """Stop the worker while no worker may run, once its bubble is over; True while it is stopped for that."""
        if self.off() and (self._held or self.gate.shut):
            self._held = True
            self._signal(signal.SIGSTOP)  # at each look: something else may have continued it
        elif self._held:
            self._held = False
            self._let_go()
        return self._held

    def _look(self, now_ns: int) -> None:
        """Add the worker's opportunity since the latest sample.

        If it waits for a core now, only its CPU time counts, since the kernel does not report a wait before its end.
        """
        core, since_ns = self._sample(), now_ns - self._looked_ns
        opportunity_ns = min(since_ns, core.ran_ns - self._core.ran_ns)
        if core.sleeps:
            opportunity_ns = max(opportunity_ns, since_ns - max(0, core.waited_ns - self._core.waited_ns))
        self._opportunity_ns += opportunity_ns
        self._looked_ns, self._core = now_ns, core

    def _ended_ns(self, seq: int) -> int | None:
        """Return the time when bubble ``seq`` ended, 1 if that is too long ago (the gate keeps 64), None while open."""
        if self.gate.is_open(seq):
            return None
        return self.gate.closed_ns(seq) if self.gate.seq - seq < 32 else 1

    def _sample(self) -> _Core:
        """Return the worker's use of the cores so far."""
        with contextlib.suppress(OSError, IndexError):
            threads = list(Path(f"/proc/{self.pid}/task").iterdir())  # others may run though the first has ended
            states = {state_in(thread / "stat") for thread in threads}  # first: the times below are then not older
            waited_ns = sum(waited_ns_in(thread / "schedstat") for thread in threads)
            return _Core(time.clock_gettime_ns(~self.pid << 3 | _SCHEDULED), waited_ns, states <= _ASLEEP)
        return replace(self._core, sleeps=False)

    def _ration(self, needed: Callable[[], bool], after: Callable[[], None] = lambda: None) -> None:
        """Let the worker run in bubbles only while ``needed`` returns True; then call ``after``."""
        self._signal(signal.SIGSTOP)
        self._rationing = threading.Thread(target=self._serve_rations, args=(needed, after), daemon=True)
        self._rationing.start()

    def _serve_rations(self, needed: Callable[[], bool], after: Callable[[], None]) -> None:
        seq = self.gate.seq
        if self.gate.is_open(seq):  # the next bubble may be open already
            seq -= 1
        while not (self._over or self.gate.ended or self.ending):
            bubble = self.gate.wait(seq)
            if bubble is None or self._over or self.ending:
                continue
            seq = bubble.seq
            self._looked_ns, self._core = time.monotonic_ns(), self._sample()
            self._signal(signal.SIGCONT)
            while self.gate.is_open(seq) and not self._over and needed():
                self.gate.wait_change(seq, _SOON_NS)  # a job may wait at the same futex before us, or requeue us
            if not needed():
                break
            self._look(time.monotonic_ns())
            self._signal(signal.SIGSTOP)
        if self._over:  # released between the check and the signal
            self._let_go()
        after()

    def _charge(self) -> None:
        if self._opportunity_ns >= self.grace_ns:
            self.violations += 1
            if self._overdue_in not in self._blamed:
                self._blamed.append(self._overdue_in)
        if self.violations >= self.max_overruns:
            times = f"{self.violations} times" if self.violations > 1 else "once"
            by = f"{self.grace_ns / 1e9:g} s (grace_ms) {times} (max_overruns)"
            self._fail(Cause.OVERRUN, f"{', '.join(self._blamed)} ran on after its bubble by more than {by}")

    def _fail(self, cause: Cause, detail: str) -> None:
        self.ending = self.ending or Ending(How.FAIL, cause, detail)

    def _let_go(self) -> None:
        """Continue a worker that may run outside bubbles."""
        if self.waits:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if not self._gone:
                os.killpg(self.pid, number)


@dataclass(eq=False, repr=False)
class Overtime:
    """Account of one worker's CPU time outside bubbles: that which bubbles cannot have had on all its cores."""

    busy_s: Callable[[], float]  # returns the total CPU time of the worker's processes
    gate: SharedGateReader
    cores: int  # number of cores that the worker may use while a bubble is open
    clock: Callable[[], float] = time.monotonic  # monotonic time in seconds

    def __post_init__(self) -> None:
        self._left_s = _ALLOWANCE_S
        self._at: tuple[float, float, int] | None = None  # the latest look

    def look(self) -> None:
        """Update the account; called a few times a second."""
        now_s, busy_s, open_ns = self.clock(), self.busy_s(), self.gate.open_ns()
        if self._at is not None:
            then_s, before_s, opened_ns = self._at
            inside_s = self.cores * (open_ns - opened_ns) / 1e9
            outside_s = max(0.0, busy_s - before_s - inside_s)
            self._left_s = min(_ALLOWANCE_S, self._left_s + _SHARE * (now_s - then_s) - outside_s)
        self._at = now_s, busy_s, open_ns

    @property
    def overdrawn(self) -> bool:
        """True if the worker must be stopped outside bubbles."""
        return self._left_s < 0

    @property
    def exceeded_s(self) -> float:
        """CPU time that the worker used outside bubbles, although it was stopped there, in s; 0 while it may go on."""
        return _ALLOWANCE_S + _LAST_S if self._left_s <= -_LAST_S else 0.0
