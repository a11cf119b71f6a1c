"""One worker from its start to its end, as its agent sees it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.fill import hearsay
from megatron.fill.device.port import Limiter
from megatron.fill.runtime.enforcer import Enforcer
from megatron.fill.runtime.folder import OUTPUT
from megatron.fill.runtime.output import BoundedOutput
from megatron.fill.runtime.spec import Outcome
from megatron.fill.runtime.steplog import StepLog
from megatron.fill.sidetask.base import RESULT
from megatron.fill.types import JobState

TICK_S = 0.2
STOP_S = 10.0  # how long a worker may take to save and stop
_READ_BYTES = 64 * 1024


class JobRun:
    """Watches one worker.

    Args:
        worker: started with its output on a pipe and in a process group of its own.
        limiter: what holds it; let go of at the end.
        ask_to_stop: asks the worker to save and stop.
        stop: asked every tick: why the worker should save and stop now, ``""`` to go on.
        end: asked every tick: why the worker must end at once and save nothing, ``""`` to go on.
        ticks: called every tick.
    """

    def __init__(
        self,
        worker: subprocess.Popen[bytes],
        log: StepLog,
        directory: Path,
        enforcer: Enforcer,
        limiter: Limiter,
        max_output_bytes: int,
        ask_to_stop: Callable[[], None],
        stop: Callable[[], str],
        end: Callable[[], str],
        ticks: Sequence[Callable[[], None]],
    ) -> None:
        self.worker = worker
        self.log = log
        self.directory = directory
        self.enforcer = enforcer
        self.limiter = limiter
        self.max_output_bytes = max_output_bytes
        self.ask_to_stop = ask_to_stop
        self.stop = stop
        self.end = end
        self.ticks = ticks
        self.verdict: str | None = None  # why the worker was killed, if it was
        self.stopped = ""  # why it was asked to stop
        self.late = False  # it was killed because it did not stop in time
        self.cut = ""  # why it was ended at once through no fault of its own
        self.ended_ns = 0
        self._unexplained = ""  # what the kernel ended it for
        self._output = BoundedOutput(directory / OUTPUT)
        self._deadline: float | None = None

    def watch(self) -> None:
        """Wait for the worker's end, and bring it about where needed."""
        assert self.worker.stdout is not None
        pipe = self.worker.stdout.fileno()
        os.set_blocking(pipe, False)
        exit_fd = os.pidfd_open(self.worker.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(exit_fd, selectors.EVENT_READ)
            selector.register(pipe, selectors.EVENT_READ)
            tick, look_s = time.monotonic(), TICK_S
            while self.worker.poll() is None:
                for key, _ in selector.select(min(look_s, TICK_S)):
                    if key.fd == pipe and not (self._pump(pipe) and self._may_print()):
                        selector.unregister(pipe)
                now = time.monotonic()
                if not self.stopped:
                    look_s = self.enforcer.check()
                if now - tick < TICK_S:
                    continue
                tick = now
                for look in self.ticks:
                    look()
                if self.verdict is None:
                    self._judge(now)
        os.close(exit_fd)
        self.ended_ns = time.monotonic_ns()
        self._unexplained = self.limiter.explain()
        self.limiter.kill()
        self.limiter.close()
        while self._pump(pipe) and self._may_print():
            pass
        self._output.close()
        self.worker.stdout.close()

    def _judge(self, now: float) -> None:
        self.cut = self.end()
        if self.cut:
            self._kill(self.cut)
            return
        if not self._may_print():  # before any other fault: it waits for somebody to read on
            limit_mib = self.max_output_bytes / 2**20
            self._kill(f"printed more than {limit_mib:g} MiB; output.log has the beginning and the end")
            return
        self.stopped = self.stopped or self.stop()
        if self.stopped:
            if self._deadline is None:
                self.enforcer.release()
                self.ask_to_stop()
                self._deadline = now + STOP_S
            elif now > self._deadline:
                self.late = True
                self._kill(f"{self.log.phase.callback} did not return within {STOP_S:g} s of the stop: {self.stopped}")
            return
        beyond = self.limiter.look()
        if beyond:
            self._kill(beyond)
        elif self.enforcer.verdict:
            self._kill(self.enforcer.verdict)

    def _may_print(self) -> bool:
        """Whether the job may print more; what it prints beyond that is not read, so it waits for its end."""
        return self._output.total_bytes <= self.max_output_bytes

    def _pump(self, pipe: int) -> bool:
        """Move some output to its file; False at its end, or when there is none now."""
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        self._output.write(data)
        return bool(data)

    def _kill(self, verdict: str) -> None:
        self.verdict = verdict
        self.limiter.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.worker.pid, signal.SIGKILL)
        self.worker.wait()

    def outcome(self, unit: str) -> tuple[Outcome, bool]:
        """How the job ended here, and whether the worker died without a word (crashed, or was killed from outside).

        Args:
            unit: of the job's work, where the worker left none.
        """
        left = Outcome.left(self.log)
        result = (left.result if left else {}) or _read_result(self.directory)
        if self.verdict is None and left is not None:
            return replace(left, result=result), False
        outcome = Outcome(
            JobState.FAILED, self.verdict or self._death(), unit=left.unit if left else unit, result=result
        )
        return outcome, self.verdict is None

    def _death(self) -> str:
        if self._unexplained:
            return self._unexplained
        code = self.worker.returncode
        where = self.log.phase.callback
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the worker was killed by {signal.Signals(-code).name} {'in ' * where.endswith(')')}{where}"
        return f"the worker exited with status {code} {'in ' * where.endswith(')')}{where}"


def _read_result(directory: Path) -> dict[str, Any]:
    try:
        result = hearsay.read_json(directory / RESULT)
        return result if isinstance(result, dict) else {}
    except (OSError, ValueError):
        return {}
