"""One worker from its start to its end, as its agent sees it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.fill.runtime.enforcer import Enforcer
from megatron.fill.runtime.output import BoundedOutput
from megatron.fill.runtime.spec import Outcome
from megatron.fill.runtime.steplog import StepLog
from megatron.fill.sidetask.base import RESULT
from megatron.fill.types import JobState

OUTPUT = "output.log"  # in the job's folder
TICK_S = 0.2
STOP_S = 10.0  # how long a worker may take to save and stop
_READ_BYTES = 64 * 1024
_READS_PER_TICK = 32  # bounds what a job that floods its output costs the machine: 10 MiB/s


class JobRun:
    """Watches one worker.

    Args:
        worker: started with its output on a pipe and in a process group of its own.
        stop: asked every tick: why the worker should save and stop now, ``""`` to go on.
        lost: asked every tick: why the worker must end at once and save nothing, ``""`` to go on.
        tick: called every tick.
    """

    def __init__(
        self,
        worker: subprocess.Popen[bytes],
        log: StepLog,
        directory: Path,
        enforcer: Enforcer,
        max_output_bytes: int,
        stop: Callable[[], str],
        lost: Callable[[], str],
        tick: Callable[[], None],
    ) -> None:
        self.worker = worker
        self.log = log
        self.directory = directory
        self.enforcer = enforcer
        self.max_output_bytes = max_output_bytes
        self.stop = stop
        self.lost = lost
        self.tick = tick
        self.verdict: str | None = None  # why the worker was killed, if it was
        self.stopped = ""  # why it was asked to stop
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
            reads, tick = 0, time.monotonic()
            while self.worker.poll() is None:
                for key, _ in selector.select(TICK_S):
                    if key.fd == pipe:
                        reads += 1
                        if not self._pump(pipe) or reads >= _READS_PER_TICK:
                            selector.unregister(pipe)
                now = time.monotonic()
                if now - tick < TICK_S:
                    continue
                if reads >= _READS_PER_TICK and pipe not in selector.get_map():
                    selector.register(pipe, selectors.EVENT_READ)
                reads, tick = 0, now
                self.tick()
                if self.verdict is None:
                    self._judge(now)
        os.close(exit_fd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.worker.pid, signal.SIGKILL)
        while self._pump(pipe) and self._output.total_bytes < self.max_output_bytes:
            pass
        self._output.close()
        self.worker.stdout.close()

    def _judge(self, now: float) -> None:
        lost = self.lost()
        if lost:
            self._kill(lost)
            return
        self.stopped = self.stopped or self.stop()
        if self.stopped:
            if self._deadline is None:
                self.enforcer.release()
                self.worker.terminate()
                self._deadline = now + STOP_S
            elif now > self._deadline:
                self._kill(f"{self.log.phase.callback} did not return within {STOP_S:g} s of the stop: {self.stopped}")
            return
        self.enforcer.check()
        limit = self.max_output_bytes
        if self._output.total_bytes > limit:
            self._kill(f"printed more than {limit / 2**20:g} MiB; output.log has the beginning and the end")
        elif self.enforcer.verdict:
            self._kill(self.enforcer.verdict)

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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.worker.pid, signal.SIGKILL)
        self.worker.wait()

    def outcome(self, unit: str) -> tuple[Outcome, bool]:
        """How the job ended here, and whether the worker died without a word (crashed, or was killed from outside).

        Args:
            unit: of the job's work, where the worker left none.
        """
        left = Outcome.read(self.directory)
        if self.verdict is None and left is not None:
            return left, False
        result = left.result if left else _read_result(self.directory)
        outcome = Outcome(
            JobState.FAILED, self.verdict or self._death(), unit=left.unit if left else unit, result=result
        )
        return outcome, self.verdict is None

    def _death(self) -> str:
        code = self.worker.returncode
        where = self.log.phase.callback
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the worker was killed by {signal.Signals(-code).name} {'in ' * where.endswith(')')}{where}"
        return f"the worker exited with status {code} {'in ' * where.endswith(')')}{where}"


def _read_result(directory: Path) -> dict[str, Any]:
    try:
        return json.loads((directory / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
