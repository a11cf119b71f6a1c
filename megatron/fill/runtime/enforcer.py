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
        self._waited_ns = self._waiting_ns()  # when last no step was overdue
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
            self._waited_ns = self._waiting_ns()
            self._signal(signal.SIGCONT)  # whoever stopped it was not us, and it is not to block its seat
            return _LOOK_S
        if now_ns - ended_ns > self.grace_ns:
            self._stop(step, now_ns, ended_ns)
        return _SOON_S

    def release(self) -> None:
        """Stop watching and let the worker run, so that it can end."""
        self._over = True
        self._signal(signal.SIGCONT)

    def _stop(self, step: tuple[int, int], now_ns: int, ended_ns: int) -> None:
        self._signal(signal.SIGSTOP)
        self._opportunity_ns = max(0, now_ns - ended_ns - (self._waiting_ns() - self._waited_ns))
        self._hangs_at_ns = now_ns + _HUNG_NS
        self._rationing = threading.Thread(target=self._ration, args=step, daemon=True)
        self._rationing.start()

    def _ended_ns(self, seq: int) -> int | None:
        """When bubble ``seq`` ended, or at the latest (the gate remembers 64); None while it is open."""
        if self.gate.is_open(seq):
            return None
        return self.gate.closed_ns(seq) if self.gate.seq - seq < 32 else 1

    def _waiting_ns(self) -> int:
        """How long the worker has been ready to run without a core, in all."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            return int(Path(f"/proc/{self.pid}/schedstat").read_text(encoding="ascii").split()[1])
        return 0

    def _ration(self, step_seq: int, step_count: int) -> None:
        """Let the overdue step run inside bubbles only, until it ends."""
        seq = self.gate.seq
        while not (self._over or self.gate.ended or self.verdict):
            bubble = self.gate.wait(seq)
            if bubble is None or self._over or self.verdict:
                continue
            seq = bubble.seq
            begun_ns, waited_ns = time.monotonic_ns(), self._waiting_ns()
            self._signal(signal.SIGCONT)
            self.gate.wait_change(seq, None)
            if self.log.step_seq != step_seq or self.log.step_count != step_count:
                break
            self._signal(signal.SIGSTOP)
            self._opportunity_ns += time.monotonic_ns() - begun_ns - (self._waiting_ns() - waited_ns)
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
