"""The framework-enforced time limit: a step that runs on after its bubble is paused, and at last ended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from megatron.fill.gate import SharedGateReader
from megatron.fill.runtime.steplog import StepLog


class Enforcer:
    """Watches one worker.

    A step that is still running ``grace_ns`` after its bubble has ended is an offence: the worker's process group is
    stopped, and continued only while bubbles are open, until the step ends.  Each further bubble that ends before the
    step does is another offence.

    Args:
        pid: the worker's process and process group.
        max_overruns: the number of offences at which ``verdict`` is given.
    """

    def __init__(self, pid: int, gate: SharedGateReader, log: StepLog, grace_ns: int, max_overruns: int) -> None:
        self.pid = pid
        self.gate = gate
        self.log = log
        self.grace_ns = grace_ns
        self.max_overruns = max_overruns
        self.offences = 0
        self.verdict: str | None = None
        self._longest_ns = 0
        self._rationing: threading.Thread | None = None
        self._over = False

    def check(self) -> None:
        """Look once; called a few times a second, cheap when all is well."""
        if self._rationing is not None and self._rationing.is_alive():
            return
        seq = self.log.step_seq
        if seq == 0:
            return
        ended_ns = self._ended_ns(seq)
        if ended_ns is not None and time.monotonic_ns() - ended_ns > self.grace_ns:
            self._offend(time.monotonic_ns() - ended_ns)
            self._signal(signal.SIGSTOP)
            self._rationing = threading.Thread(target=self._ration, args=(seq, self.log.step_count), daemon=True)
            self._rationing.start()

    def release(self) -> None:
        """Stop watching and let the worker run, so that it can end."""
        self._over = True
        self._signal(signal.SIGCONT)

    def _ended_ns(self, seq: int) -> int | None:
        """When bubble ``seq`` ended; None while it is open."""
        if self.gate.is_open(seq):
            return None
        return self.gate.closed_ns(seq) if self.gate.seq - seq < 32 else 1

    def _offend(self, overrun_ns: int) -> None:
        self.offences += 1
        self._longest_ns = max(self._longest_ns, overrun_ns)
        if self.offences >= self.max_overruns:
            self.verdict = (
                f"{self.log.phase.callback} ran on after the end of its bubble {self.offences} times, "
                f"by {self._longest_ns / 1e9:.2f} s at most (allowed: {self.grace_ns / 1e9:g} s)"
            )

    def _ration(self, step_seq: int, step_count: int) -> None:
        """Let the overdue step run inside bubbles only, until it ends."""
        seq = self.gate.seq
        while not (self._over or self.gate.ended or self.verdict):
            bubble = self.gate.wait(seq)
            if bubble is None or self._over:
                continue
            seq = bubble.seq
            self._signal(signal.SIGCONT)
            self.gate.wait_change(seq, None)
            if self.log.step_seq != step_seq or self.log.step_count != step_count:
                return
            self._signal(signal.SIGSTOP)
            self._offend(0)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
