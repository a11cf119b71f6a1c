"""What holds a worker to its bubbles: a step that runs on is paused and at last ended, and so is other work outside."""

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
from megatron.fill.agent.overtime import Overtime
from megatron.fill.linux.state import state_in, waited_ns_in
from megatron.fill.pages.gate import SharedGateReader
from megatron.fill.pages.steplog import StepLog

_LOOK_S = 0.2  # between two looks while all is well
_SOON_S = 0.02  # while a step is overdue
_SOON_NS = int(_SOON_S * 1e9)
_SCHEDULED = 2  # the kind of clock that counts a process's time on a core: with its number it names the clock
_ASLEEP = set("SDIZX")  # the kernel's letters; what is stopped could not have gone on


@dataclass(frozen=True, slots=True)
class _Core:
    """What a process has had of the cores so far, all its threads.

    Attributes:
        ran_ns: the time on one.
        waited_ns: the time that its threads were ready and had none, but for a wait that goes on.
        sleeps: none of them runs or is ready.
    """

    ran_ns: int = 0
    waited_ns: int = 0
    sleeps: bool = False


class Enforcer:
    """Watches one worker (Watcher).

    A step that is still in flight ``grace_ns`` after its bubble has ended gets its process group stopped, and
    continued only while bubbles are open, until the step ends.  What counts against it is its *opportunity*: the time
    after its bubble in which it was neither stopped nor waiting for a core that the main job had.  A step that had more
    of that than the grace has offended; one that does not end soon after that hangs.

    A worker that has used up its overtime is continued only while bubbles are open, too; and none runs at all while
    filling is off.

    All is called by the thread that watches the worker.  A thread of its own rations the worker to bubbles: it reads
    what is set here, and writes ``offences``, ``ending`` and the opportunity that a step had.

    Args:
        pid: the worker's process and process group, which it cannot leave.
        max_overruns: the number of steps (or starts, or pauses) that may offend before the worker must end.
        overtime: its account of CPU time outside bubbles; None for no limit.
        off: whether nothing is to run: paused by the operator, or by the brake.
        hung_ns: how long a step that has used up its grace has to end, in the bubbles that come.

    Attributes:
        offences: so far.
        ending: that the worker must be ended, and why; None while it need not.
    """

    def __init__(
        self,
        pid: int,
        gate: SharedGateReader,
        log: StepLog,
        grace_ns: int,
        max_overruns: int,
        overtime: Overtime | None = None,
        off: Callable[[], bool] = lambda: False,
        hung_ns: int = 800_000_000,
    ) -> None:
        self.pid = pid
        self.gate = gate
        self.log = log
        self.grace_ns = grace_ns
        self.max_overruns = max_overruns
        self.overtime = overtime
        self.off = off
        self.hung_ns = hung_ns
        self.offences = 0
        self.ending: Ending | None = None
        self._overdue: int | None = None  # the bubble that has ended, and that it has not left
        self._looked_ns, self._core = 0, _Core()  # when its worker was last looked at, and what it had had then
        self._opportunity_ns = self._hangs_at_ns = 0
        self._overdue_in = ""  # the callback that is overdue: when it is charged, it may have returned
        self._blamed: list[str] = []  # the callbacks that offended, each once
        self._rationing: threading.Thread | None = None
        self._held = False  # stopped while nothing is to run
        self._over = self._gone = False

    def check(self) -> float:
        """Look once; seconds until the next look is due."""
        now_ns = time.monotonic_ns()
        if self.ending or self._over:
            return _LOOK_S
        if self._hold():
            return _LOOK_S
        if self._rationing is not None and self._rationing.is_alive():
            if self._hangs_at_ns and now_ns >= self._hangs_at_ns and self._opportunity_ns >= self.grace_ns:
                late_s = self._opportunity_ns / 1e9
                self._fail(f"{self._overdue_in} hung: it went on for {late_s:.2g} s after its bubble")
            return _SOON_S
        callback = self.log.phase.callback  # looked at first: what is still in flight then was so here
        # Not which step it is: only one can run on after its bubble, whatever the log says of more that have ended.
        seq = self.log.step_seq
        ended_ns = self._ended_ns(seq) if seq else None
        if ended_ns is None:
            self._overdue, self._core = None, self._sample()
            if self._overdrawn():
                self._hangs_at_ns = 0  # a step that is stopped before its end is none that hangs
                self._ration(self._overdrawn)
            else:
                self._signal(signal.SIGCONT)  # whoever stopped it was not us, and it is not to block its seat
            return _LOOK_S
        if self._overdue != seq:
            self._overdue, self._opportunity_ns, self._looked_ns = seq, 0, ended_ns
            # How long it has had a core since the bubble's end, nobody knows; what it waited for one may be in this.
            self._core = replace(self._sample(), waited_ns=self._core.waited_ns)
        self._look(now_ns)
        left_ns = self.grace_ns - (now_ns - ended_ns)
        if left_ns < 0:
            self._hangs_at_ns = now_ns + self.hung_ns
            self._overdue_in = callback
            self._ration(lambda: self.log.step_seq == seq, self._charge)
            return _SOON_S
        return min(_LOOK_S, max(_SOON_S, left_ns / 1e9))

    def look(self) -> Ending | None:
        """Bring the account of work outside bubbles up to date, and say whether the worker must end."""
        if self.overtime is not None and not self._over:
            self.overtime.look()
            if self.overtime.verdict:
                self._fail(self.overtime.verdict)
        return self.ending

    def release(self) -> None:
        """Stop watching and let the worker run, so that it can end."""
        self._over = True
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """The worker has ended, and its number may become another's: no more signals."""
        self._over = self._gone = True

    def _hold(self) -> bool:
        """Stop the worker while nothing is to run, once its bubble is over; whether it is stopped for that."""
        if self.off() and (self._held or self.gate.shut):
            self._held = True
            self._signal(signal.SIGSTOP)  # again and again: it may have been continued
        elif self._held:
            self._held = False
            self._signal(signal.SIGCONT)
        return self._held

    def _overdrawn(self) -> bool:
        return self.overtime is not None and self.overtime.overdrawn

    def _look(self, now_ns: int) -> None:
        """Add the opportunity that it had since it was last looked at.

        While it slept it could have gone on; while it was ready and had no core it could not.  Of one that is ready
        now only the time on a core counts: the kernel tells how long it has been waiting no sooner than it gets one.
        """
        core, since_ns = self._sample(), now_ns - self._looked_ns
        opportunity_ns = min(since_ns, core.ran_ns - self._core.ran_ns)
        if core.sleeps:
            opportunity_ns = max(opportunity_ns, since_ns - max(0, core.waited_ns - self._core.waited_ns))
        self._opportunity_ns += opportunity_ns
        self._looked_ns, self._core = now_ns, core

    def _ended_ns(self, seq: int) -> int | None:
        """When bubble ``seq`` ended, or at the latest (the gate remembers 64); None while it is open."""
        if self.gate.is_open(seq):
            return None
        return self.gate.closed_ns(seq) if self.gate.seq - seq < 32 else 1

    def _sample(self) -> _Core:
        """What the worker has had so far.  Its first thread may have ended long ago, while others go on."""
        with contextlib.suppress(OSError, IndexError):
            threads = list(Path(f"/proc/{self.pid}/task").iterdir())
            states = {state_in(thread / "stat") for thread in threads}  # before the rest: what goes on later is later
            waited_ns = sum(waited_ns_in(thread / "schedstat") for thread in threads)
            return _Core(time.clock_gettime_ns(~self.pid << 3 | _SCHEDULED), waited_ns, states <= _ASLEEP)
        return replace(self._core, sleeps=False)

    def _ration(self, needed: Callable[[], bool], after: Callable[[], None] = lambda: None) -> None:
        """Let the worker run inside bubbles only, as long as that is needed; what to do then."""
        self._signal(signal.SIGSTOP)
        self._rationing = threading.Thread(target=self._serve_rations, args=(needed, after), daemon=True)
        self._rationing.start()

    def _serve_rations(self, needed: Callable[[], bool], after: Callable[[], None]) -> None:
        seq = self.gate.seq
        while not (self._over or self.gate.ended or self.ending):
            bubble = self.gate.wait(seq)
            if bubble is None or self._over or self.ending:
                continue
            seq = bubble.seq
            self._looked_ns, self._core = time.monotonic_ns(), self._sample()
            self._signal(signal.SIGCONT)
            while self.gate.is_open(seq) and not self._over:
                self.gate.wait_change(seq, _SOON_NS)  # a job may have queued before us, or moved us away
            if not needed():
                break
            self._look(time.monotonic_ns())
            self._signal(signal.SIGSTOP)
        if self._over:  # released between a look at that and the signal
            self._signal(signal.SIGCONT)
        after()

    def _charge(self) -> None:
        """The overdue step has ended, or the watch over it."""
        if self._opportunity_ns >= self.grace_ns:
            self.offences += 1
            if self._overdue_in not in self._blamed:
                self._blamed.append(self._overdue_in)
        if self.offences >= self.max_overruns:
            times = f"{self.offences} times" if self.offences > 1 else "once"
            self._fail(
                f"{', '.join(self._blamed)} ran on after its bubble by more than {self.grace_ns / 1e9:g} s "
                f"(--fill-grace-ms) {times} (--fill-max-overruns)"
            )

    def _fail(self, why: str) -> None:
        self.ending = self.ending or Ending(How.FAIL, why)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if not self._gone:
                os.killpg(self.pid, number)
