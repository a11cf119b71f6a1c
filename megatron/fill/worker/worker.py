"""The processes of a worker: the first one, which the agent starts (``main``), and the job's, in the sandbox.

The first process waits for its job, reads the spec, maps the pages that it shares with the rank, and starts the job in
the sandbox; it stays outside itself.  A task inside inherits the mapped pages.  It has no descriptors of them, so it
cannot map read-only pages again for writing.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from megatron.fill.errors import SandboxError
from megatron.fill.linux import host
from megatron.fill.linux.reap import end_descendants
from megatron.fill.pages.baton import Baton, TailGate
from megatron.fill.pages.board import CycleBoardReader
from megatron.fill.pages.control import ControlReader
from megatron.fill.pages.gate import GateReader, SharedGateReader
from megatron.fill.pages.steplog import StepLog, map_log
from megatron.fill.sandbox.powers import limit_resources, tasks_of
from megatron.fill.sandbox.process import SandboxedProcess
from megatron.fill.worker.command import CommandRun
from megatron.fill.worker.pacing import StepDevice, StepPages
from megatron.fill.worker.spec import Outcome, SandboxReport, WorkerSpec
from megatron.fill.worker.taskrun import TaskRun

logger = logging.getLogger("pipefill.worker")

_MOST_PATH_BYTES = 1 << 14


class Worker:
    """Runs one job to its end, or until the training is over."""

    def __init__(self, spec: WorkerSpec, log_fd: int, channel: socket.socket) -> None:
        self.spec = spec
        self.channel = channel
        self.gate = SharedGateReader(spec.gate_fd)
        self.board = CycleBoardReader(spec.board_fd)
        self.control = ControlReader(spec.control_fd)
        self.baton = Baton(spec.baton_fd)
        self.view: GateReader = TailGate(self.gate, self.baton) if spec.tail else self.gate
        self.log = StepLog(map_log(log_fd))
        for fd in (spec.gate_fd, spec.board_fd, spec.control_fd, spec.baton_fd, log_fd):
            os.close(fd)  # they stay mapped
        self._stop = False
        signal.signal(signal.SIGTERM, self._on_term)

    def hold(self) -> int:
        """Start the job in its sandbox, wait until it has ended, and return its exit code."""
        if self.spec.work.command is not None:
            self._run_command().leave(self.log)
            return 0
        held = start_sandboxed(self.spec, self.channel, self._inside)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the task handles it
        return self.wait(held)

    def wait(self, held: SandboxedProcess) -> int:
        """Wait for the end of the task's process; return its exit code."""
        return held.wait()

    def device(self) -> StepDevice:
        """The device as the task's steps use it."""
        if self.spec.device.startswith("cuda"):
            from megatron.fill.device import cuda

            return StepDevice(settle=partial(cuda.settle, self.spec.device))
        return StepDevice(preemptive=self.spec.device == "cpu")

    def _inside(self) -> None:
        """Run the task; called in its own process, once it may begin."""
        baton = None if self.spec.tail else self.baton
        pages = StepPages(self.view, self.log, baton, self.control)
        TaskRun(self.spec, pages, self.board, self.stopping, self.device()).run().leave(self.log)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads that a task left behind must not keep the process

    def stopping(self) -> bool:
        """True once the agent has asked the worker to stop."""
        return self._stop

    def _on_term(self, number: int, frame: object) -> None:
        self._stop = True

    def _run_command(self) -> Outcome:
        if not self.spec.tail:
            self.baton.hold()
        self.log.unit = "seconds"
        left = (lambda seq: None) if self.spec.tail else self.baton.pass_on
        start = partial(start_sandboxed, self.spec, self.channel)
        return CommandRun(self.spec, start, self.view, self.gate, self.log, self.stopping, left, self.control).run()


def start_sandboxed(spec: WorkerSpec, channel: socket.socket, body: Callable[[], None]) -> SandboxedProcess:
    """Start ``body`` in the spec's sandbox, report that, and let it run once the agent agrees.

    Args:
        channel: socket to the agent; closed when this returns.

    Raises:
        SystemExit: the sandbox cannot be set up, which is reported; or the agent has ended or gives the job up.
    """
    limits, user = spec.limits, spec.sandbox.user if spec.sandbox.user is not None else os.getuid()
    # The kernel counts all tasks of the user, including those of other jobs, and those may become more.  The exact
    # limit is the watch over this worker's own tasks; this one stops a job that creates them faster than that.
    tasks = tasks_of(user) + 2 * limits.processes

    def prepare() -> None:
        channel.close()
        host.yield_to_main_job(spec.cpus)
        limit_resources(limits.memory_bytes if spec.device == "cpu" else None, tasks, limits.files)

    def run() -> None:
        os.chdir(spec.directory)
        host.apply_environment(spec.env)
        body()

    try:
        held = SandboxedProcess(spec.sandbox, prepare, run)
    except SandboxError as error:
        SandboxReport(error=str(error)).send(channel)
        sys.exit(1)
    SandboxReport(held.init, held.pid, tuple(held.lacking)).send(channel)
    wanted = channel.recv(1)
    channel.close()
    if not wanted:
        held.kill()
        sys.exit(1)
    held.let_go()
    return held


def main(*given: str) -> None:
    """Run the worker's first process; ``WorkerProcess`` gives the arguments of ``run``."""
    run(Worker, *given)


def run(
    kind: Callable[[WorkerSpec, int, socket.socket], Worker], parent: str, channel_fd: str, ahead: str, _run_dir: str
) -> None:
    """Run the first process of a worker of this kind."""
    host.die_with_parent(int(parent))
    host.adopt_orphans()
    # So that the agent's signal to look at the shared pages interrupts a sleep.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for name in filter(None, ahead.split(",")):
        with contextlib.suppress(Exception):  # a job that needs the module reports its absence
            importlib.import_module(name)
    channel = socket.socket(fileno=int(channel_fd))
    path, fds, _, _ = socket.recv_fds(channel, _MOST_PATH_BYTES, 1)
    if not fds:  # the agent ended this process without a job
        return
    spec = WorkerSpec.from_json(Path(os.fsdecode(path)).read_text(encoding="utf-8"))
    os.environ.clear()
    os.environ.update(spec.environment)
    code = kind(spec, fds[0], channel).hold()
    end_descendants()  # without a process namespace, processes of the job may have become children of this one
    _end_as(code)


def _end_as(code: int) -> NoReturn:
    """End this process with the job's exit status, or by the same signal if ``code`` is negative."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))
