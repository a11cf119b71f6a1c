"""Runs an ``ImperativeTask`` as a side task whose steps are slices of time.

The task runs in the main thread of a child process, where a signal can interrupt it.  The worker's side is a
``SideTask``, so that all others treat it as any: the loop measures how long a pause takes, and keeps that free.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

from megatron.fill.device import cuda
from megatron.fill.errors import TaskError
from megatron.fill.linux import host
from megatron.fill.linux.wakeup import readable
from megatron.fill.sidetask.base import SideTask, TaskContext
from megatron.fill.sidetask.blame import PrintedError, task_traceback
from megatron.fill.sidetask.imperative import ImperativeTask
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.worker.spec import why_failed

_PAUSE = signal.SIGUSR2
_SLICE_S = 0.001  # duration of a step
_READ_BYTES = 1 << 16


class Driven(SideTask):
    """The worker's side of an imperative task.

    Args:
        enter: called in the task's process before and after ``init``, as ``TaskMachine.enter``.
        stop_s: time limit of ``stop``, after which the task's process is killed.
    """

    def __init__(self, task: ImperativeTask, enter: Callable[[], None], stop_s: float = 2.0) -> None:
        self.unit = task.unit  # type: ignore[misc]
        self._task, self._enter, self._stop_s = task, enter, stop_s
        self._pid = 0
        self._state = ""  # latest state reported by the task's process
        self._work = 0.0  # work done since the latest step
        self._text = b""

    def create(self, *args: Any, **kwargs: Any) -> None:
        self._told, tell = os.pipe()
        listen, self._go = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._told)
            os.close(self._go)
            _Workload(self._task, self.context, self._enter, listen, tell).run(kwargs)
        os.close(tell)
        os.close(listen)
        self._await("created")

    def init(self) -> None:
        self._command(b"i")
        self._await("held")

    def start(self) -> None:
        if self._state == "held":
            self._state = "running"
            self._command(b"s")

    def run_next_step(self) -> float:
        """Let the workload run for a slice of time, and return the work that it did."""
        start_s = time.monotonic()
        while self._state == "running" and (left_s := start_s + _SLICE_S - time.monotonic()) > 0:
            self._listen(left_s)
        work, self._work = self._work, 0.0
        if self._state == "ended" and not work:
            raise StopIteration
        return time.monotonic() - start_s if self.unit == ImperativeTask.unit else work

    def pause(self) -> None:
        if self._state == "running":
            os.kill(self._pid, _PAUSE)
            while self._state == "running":
                self._listen(None)

    def stop(self) -> None:
        if not self._pid:
            return
        os.kill(self._pid, _PAUSE)
        self._command(b"x")
        end_s = time.monotonic() + self._stop_s
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > end_s:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.005)
        self._pid = 0

    def _command(self, what: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the next read finds
            os.write(self._go, what)

    def _await(self, state: str) -> None:
        while self._state != state:
            self._listen(None)

    def _listen(self, within_s: float | None) -> None:
        """Process the reports of the task's process; TaskError if it has failed or ended."""
        if not readable(within_s, self._told):
            return
        data = os.read(self._told, _READ_BYTES)
        if not data:
            pid, self._pid = self._pid, 0
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            raise TaskError(f"the process of run_gpu_workload() {host.how_ended(code)}")
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            self._hear(json.loads(line))

    def _hear(self, said: dict[str, Any]) -> None:
        self._state = said.get("state", self._state)
        self._work += said.get("work", 0.0)
        self.context.total_work = said.get("total", self.context.total_work)
        self.context.result = said.get("result", self.context.result)
        if "error" in said:
            raise PrintedError(said["error"])


class _Stop(BaseException):
    """Raised inside the workload to end it."""


class _Workload:
    """The task's own process."""

    def __init__(
        self, task: ImperativeTask, context: TaskContext, enter: Callable[[], None], listen: int, tell: int
    ) -> None:
        self.task, self._listen_fd, self._tell_fd = task, listen, tell
        self._pid = os.getpid()
        self._busy = True  # in code that a pause must not interrupt
        self._wanted = False  # a pause was requested in the meantime
        context.aside = nullcontext  # this process must not interrupt the worker's own use of the device
        self._told = context.result  # the results that the worker knows
        self._machine = TaskMachine(task, context)
        self._machine.enter = enter
        task.count = lambda work: self.tell(work=work)

    def run(self, args: dict[str, Any]) -> NoReturn:
        signal.signal(_PAUSE, lambda *_: self._on_signal())
        try:
            self._live(args)
        except _Stop:
            pass
        except BaseException as error:  # SystemExit included
            self._busy = True
            print(task_traceback(error), end="", file=sys.stderr)
            self.tell(error=why_failed(error, self._machine.callback, self.task.context))
        try:
            self._machine.stop()
        except BaseException as error:
            print(task_traceback(error), end="", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _live(self, args: dict[str, Any]) -> None:
        machine = self._machine
        machine.create(args)
        self.tell(state="created", total=self.task.context.total_work)
        if self._read() != b"i":
            raise _Stop
        machine.init()
        self.tell(total=self.task.context.total_work)
        machine.callback = "run_gpu_workload"
        self._hold()
        machine.call(self.task.run_gpu_workload)
        self._busy = True
        cuda.synchronize(self.task.context.device)
        self.tell(state="ended")
        self._read()

    def tell(self, **what: Any) -> None:
        """Send a report to the worker; a signal's pause is delayed, since its report would be mixed into this one."""
        if os.getpid() != self._pid:  # the task has forked it, and no report is sent twice
            return
        busy, self._busy = self._busy, True
        if self.task.context.result is not self._told:
            self._told = what["result"] = self.task.context.result
        data = json.dumps(what).encode() + b"\n"
        while data:
            data = data[os.write(self._tell_fd, data) :]
        self._busy = busy
        self._catch_up()

    def _on_signal(self) -> None:
        self._wanted = True
        self._catch_up()

    def _catch_up(self) -> None:
        if self._wanted and not self._busy:
            self._busy = True
            self.task.pause()
            cuda.synchronize(self.task.context.device)
            self._hold()

    def _hold(self) -> None:
        """Wait for the next bubble."""
        self._wanted = False
        self.tell(state="held")
        if self._read() != b"s":
            raise _Stop
        self.task.start()
        self._busy = False
        self._catch_up()

    def _read(self) -> bytes:
        return os.read(self._listen_fd, 1)
