"""The framework-enforced time limit: a step that runs on after its bubble is paused, and at last ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from megatron.fill.gate import SharedGateReader
from megatron.fill.runtime.steplog import StepLog

_LOOK_S = 0.2  # between two looks while all is well
_SOON_S = 0.02  # while a step is overdue
_HUNG_NS = 800_000_000  # a step that has used up its grace has this long to end, in the bubbles that come


class Enforcer:
    """Watches one worker.

    A step that is still in flight ``grace_ns`` after its bubble has ended gets its process group stopped, and
    continued only while bubbles are open, until the step ends.  What counts against it is its *opportunity*: the time
    after its bubble in which it was neither stopped nor waiting for a core that the main job had.  A step that had more
    of that than the grace has offended; one that does not end soon after that hangs.

    Args:
        pid: the worker's process and process group.
        max_overruns: the number of steps that may offend before ``verdict`` is given.
    """

    def __init__(self, pid: int, gate: SharedGateReader, log: StepLog, grace_ns: int, max_overruns: int) -> None:
        self.pid = pid
        self.gate = gate
        self.log = log
        self.grace_ns = grace_ns
        self.max_overruns = max_overruns
        self.offences = 0
        self.verdict: str | None = None
        self._overdue: tuple[int, int] | None = None  # the step in flight after its bubble
        self._looked_ns = self._ran_ns = 0  # when its worker was last looked at, and its time on a core then
        self._opportunity_ns = self._hangs_at_ns = 0
        self._rationing: threading.Thread | None = None
        self._over = False

    def check(self) -> float:
        """Look once; seconds until the next look is due."""
        now_ns = time.monotonic_ns()
        if self.verdict or self._over:
            return _LOOK_S
        if self._rationing is not None and self._rationing.is_alive():
            if now_ns >= self._hangs_at_ns and self._opportunity_ns >= self.grace_ns:
                late_s = self._opportunity_ns / 1e9
                self.verdict = f"{self.log.phase.callback} hung: it went on for {late_s:.2g} s after its bubble"
            return _SOON_S
        step = self.log.step_seq, self.log.step_count
        ended_ns = self._ended_ns(step[0]) if step[0] else None
        if ended_ns is None:
            self._overdue = None
            self._signal(signal.SIGCONT)  # whoever stopped it was not us, and it is not to block its seat
            return _LOOK_S
        if self._overdue != step:
            self._overdue, self._opportunity_ns, self._looked_ns = step, 0, ended_ns
            self._ran_ns = self._sample()[1]  # what it had of a core since the bubble's end, nobody knows
        self._look(now_ns)
        left_ns = self.grace_ns - (now_ns - ended_ns)
        if left_ns < 0:
            self._stop(step, now_ns)
            return _SOON_S
        return min(_LOOK_S, max(_SOON_S, left_ns / 1e9))

    def release(self) -> None:
        """Stop watching and let the worker run, so that it can end."""
        self._over = True
        self._signal(signal.SIGCONT)

    def _look(self, now_ns: int) -> None:
        """Add the opportunity that it had since it was last looked at.

        One that sleeps could have gone on.  Of one that is ready only the time on a core counts: how long it has been
        waiting for one, the kernel tells no sooner than it gets it.
        """
        sleeps, ran_ns = self._sample()
        since_ns = now_ns - self._looked_ns
        self._opportunity_ns += since_ns if sleeps else min(since_ns, ran_ns - self._ran_ns)
        self._looked_ns, self._ran_ns = now_ns, ran_ns

    def _stop(self, step: tuple[int, int], now_ns: int) -> None:
        self._signal(signal.SIGSTOP)
        self._hangs_at_ns = now_ns + _HUNG_NS
        self._rationing = threading.Thread(target=self._ration, args=step, daemon=True)
        self._rationing.start()

    def _ended_ns(self, seq: int) -> int | None:
        """When bubble ``seq`` ended, or at the latest (the gate remembers 64); None while it is open."""
        if self.gate.is_open(seq):
            return None
        return self.gate.closed_ns(seq) if self.gate.seq - seq < 32 else 1

    def _sample(self) -> tuple[bool, int]:
        """Whether the worker sleeps, and how long it has been on a core in all."""
        folder = Path(f"/proc/{self.pid}")
        with contextlib.suppress(OSError, IndexError, ValueError):
            state = (folder / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
            return state in "SD", int((folder / "schedstat").read_text(encoding="ascii").split()[0])
        return False, self._ran_ns

    def _ration(self, step_seq: int, step_count: int) -> None:
        """Let the overdue step run inside bubbles only, until it ends."""
        seq = self.gate.seq
        while not (self._over or self.gate.ended or self.verdict):
            bubble = self.gate.wait(seq)
            if bubble is None or self._over or self.verdict:
                continue
            seq = bubble.seq
            self._looked_ns, self._ran_ns = time.monotonic_ns(), self._sample()[1]
            self._signal(signal.SIGCONT)
            self.gate.wait_change(seq, None)
            if self.log.step_seq != step_seq or self.log.step_count != step_count:
                break
            self._look(time.monotonic_ns())
            self._signal(signal.SIGSTOP)
        if self._opportunity_ns >= self.grace_ns:
            self.offences += 1
        if self.offences >= self.max_overruns and not self.verdict:
            times = f"{self.offences} times" if self.offences > 1 else "once"
            self.verdict = (
                f"{self.log.phase.callback} ran on after its bubble by more than {self.grace_ns / 1e9:g} s {times}"
            )

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
