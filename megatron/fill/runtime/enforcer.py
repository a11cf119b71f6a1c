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

    A step that is still in flight ``grace_ns`` after its bubble has ended gets its process group stopped, and
    continued only while bubbles are open, until the step ends.  Each time that it has had ``grace_ns`` more in this
    way is an offence.

    Args:
        pid: the worker's process and process group.
        max_overruns: the number of offences at which ``verdict`` is given.
        yields: the worker gives its core up to the rank at once (idle priority), so that a step in flight between
            bubbles is starved and not running: only what it gets in further bubbles counts.  Otherwise the overrun
            itself is an offence already.
    """

    def __init__(
        self, pid: int, gate: SharedGateReader, log: StepLog, grace_ns: int, max_overruns: int, yields: bool
    ) -> None:
        self.pid = pid
        self.gate = gate
        self.log = log
        self.grace_ns = grace_ns
        self.max_overruns = max_overruns
        self.yields = yields
        self.offences = 0
        self.verdict: str | None = None
        self._rationing: threading.Thread | None = None
        self._over = False

    def check(self) -> None:
        """Look once; called a few times a second, cheap when all is well."""
        if self.verdict or (self._rationing is not None and self._rationing.is_alive()):
            return
        seq = self.log.step_seq
        ended_ns = self._ended_ns(seq) if seq else None
        if ended_ns is not None and time.monotonic_ns() - ended_ns > self.grace_ns:
            self._signal(signal.SIGSTOP)
            if not self.yields:
                self._offend()
            self._rationing = threading.Thread(target=self._ration, args=(seq, self.log.step_count), daemon=True)
            self._rationing.start()

    def release(self) -> None:
        """Stop watching and let the worker run, so that it can end."""
        self._over = True
        self._signal(signal.SIGCONT)

    def _ended_ns(self, seq: int) -> int | None:
        """When bubble ``seq`` ended, or at the latest (the gate remembers 64); None while it is open."""
        if self.gate.is_open(seq):
            return None
        return self.gate.closed_ns(seq) if self.gate.seq - seq < 32 else 1

    def _offend(self) -> None:
        self.offences += 1
        if self.offences >= self.max_overruns:
            times = f"{self.offences} times" if self.offences > 1 else "once"
            self.verdict = (
                f"{self.log.phase.callback} ran on after its bubble by more than {self.grace_ns / 1e9:g} s {times}"
            )

    def _ration(self, step_seq: int, step_count: int) -> None:
        """Let the overdue step run inside bubbles only, until it ends."""
        seq, had_ns = self.gate.seq, 0
        while not (self._over or self.gate.ended or self.verdict):
            bubble = self.gate.wait(seq)
            if bubble is None or self._over:
                continue
            seq = bubble.seq
            begun_ns = time.monotonic_ns()
            self._signal(signal.SIGCONT)
            self.gate.wait_change(seq, None)
            if self.log.step_seq != step_seq or self.log.step_count != step_count:
                return
            self._signal(signal.SIGSTOP)
            had_ns += time.monotonic_ns() - begun_ns
            if had_ns >= self.grace_ns:
                had_ns = 0
                self._offend()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
