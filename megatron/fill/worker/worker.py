"""The processes of a worker: the first one, which the agent starts (``main``), and the job's, in the sandbox.

The first process waits for its job, reads the spec, maps the pages that it shares with the rank, and starts the job in
the sandbox; it stays outside itself.  A task inside (``TaskRun``) inherits the mapped pages.  It has no descriptors of
them, so it cannot map read-only pages again for writing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.fill.errors import PlanError, SandboxError, StaleProfile
from megatron.fill.linux import host
from megatron.fill.linux.reap import end_descendants
from megatron.fill.pages.baton import Baton, TailGate
from megatron.fill.pages.board import CycleBoardReader
from megatron.fill.pages.control import ControlReader
from megatron.fill.pages.gate import SharedGateReader
from megatron.fill.pages.steplog import StepLog, WorkerPhase, map_log
from megatron.fill.profiles import JobProfile, is_amount
from megatron.fill.sandbox.powers import limit_resources, most_tasks
from megatron.fill.sandbox.process import SandboxedProcess
from megatron.fill.sidetask.base import SideTask, TaskContext
from megatron.fill.sidetask.blame import task_traceback
from megatron.fill.sidetask.imperative import ImperativeTask
from megatron.fill.sidetask.loader import load_task
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.sidetask.nodes import NodeTask
from megatron.fill.status import Cause, Then
from megatron.fill.worker import checkpoint
from megatron.fill.worker.command import CommandRun
from megatron.fill.worker.loop import StepLoop
from megatron.fill.worker.pacing import Pacer, StepDevice, StepPages, Stopped
from megatron.fill.worker.saver import Saver
from megatron.fill.worker.spec import Outcome, SandboxReport, WorkerSpec, why_failed

if TYPE_CHECKING:
    from megatron.fill.worker.nodes import NodeRun

# Modules that only some jobs need are imported for those only, since a worker's start takes time of the rank's core.

logger = logging.getLogger("pipefill.worker")

_MOST_PATH_BYTES = 1 << 14


class Worker:
    """Runs one job to its end, or until the training is over."""

    def __init__(self, spec: WorkerSpec, log_fd: int, channel: socket.socket) -> None:
        self.spec = spec
        self.channel = channel
        self.board = CycleBoardReader(spec.board_fd)
        self.control = ControlReader(spec.control_fd)
        baton, self.log = Baton(spec.baton_fd), StepLog(map_log(log_fd))
        self.gate = TailGate(spec.gate_fd, baton) if spec.tail else SharedGateReader(spec.gate_fd)
        self.pages = StepPages(self.gate, self.log, None if spec.tail else baton, self.control)
        for fd in (spec.gate_fd, spec.board_fd, spec.control_fd, spec.baton_fd, log_fd):
            os.close(fd)  # they stay mapped
        self._stop = False  # the agent has asked the worker to stop
        signal.signal(signal.SIGTERM, self._on_term)

    def run(self) -> int:
        """Run the job in its sandbox, and return its exit code."""
        start = partial(start_sandboxed, self.spec, self.channel)
        if self.spec.work.command is not None:
            CommandRun(self.spec, start, self.pages, self.control, self.stopping).run().leave(self.log)
            return 0
        process = start(self._inside)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the task handles it
        return self.wait(process)

    def wait(self, process: SandboxedProcess) -> int:
        return process.wait()

    def device(self) -> StepDevice:
        if self.spec.device.startswith("cuda"):
            from megatron.fill.device import cuda

            return StepDevice(synchronize=partial(cuda.synchronize, self.spec.device))
        return StepDevice(preemptive=self.spec.device == "cpu")

    def _inside(self) -> None:
        """Run the task; called in its own process, once it may begin."""
        TaskRun(self.spec, self.pages, self.board, self.stopping, self.device()).run().leave(self.log)

    def stopping(self) -> bool:
        return self._stop

    def _on_term(self, number: int, frame: object) -> None:
        self._stop = True


def start_sandboxed(spec: WorkerSpec, channel: socket.socket, body: Callable[[], None]) -> SandboxedProcess:
    """Start ``body`` in the spec's sandbox, report that to the agent, and let it run once the agent agrees.

    Raises:
        SystemExit: the sandbox cannot be set up, which is reported; or the agent has ended or gives the job up.
    """
    limits, user = spec.limits, spec.sandbox.user if spec.sandbox.user is not None else os.getuid()
    tasks = most_tasks(user, limits.processes)

    def prepare() -> None:
        channel.close()
        host.yield_to_main_job(spec.cpus)
        limit_resources(limits.memory_bytes if spec.device == "cpu" else None, tasks, limits.files)

    def run() -> None:
        os.chdir(spec.directory)
        host.apply_environment(spec.env)
        body()

    try:
        process = SandboxedProcess(spec.sandbox, prepare, run)
    except SandboxError as error:
        SandboxReport(error=str(error)).send(channel)
        sys.exit(1)
    SandboxReport(process.init, process.pid, tuple(process.lacking)).send(channel)
    wanted = channel.recv(1)
    channel.close()
    if not wanted:
        process.kill()
        sys.exit(1)
    process.begin()
    return process


@dataclass(eq=False, repr=False)
class TaskRun:
    """Runs one task to its end, or until the training is over."""

    spec: WorkerSpec
    pages: StepPages
    board: CycleBoardReader
    asked_to_stop: Callable[[], bool]  # called between steps
    device: StepDevice

    def __post_init__(self) -> None:
        self.log, self.directory = self.pages.log, Path(self.spec.directory)
        self._crowded = False  # the task could not give back memory that the training needs
        self._measures = False  # the job had no profile

    def run(self) -> Outcome:
        """Return the outcome of the task, whatever it raises."""
        machine: TaskMachine | None = None
        context = self.spec.context()
        unit = SideTask.unit

        def outcome(cause: Cause, detail: str = "", then: Then = Then.NONE) -> Outcome:
            total = context.total_work if is_amount(context.total_work) else self.log.total_work
            return Outcome(cause, detail, then, unit, total, context.result)

        try:
            machine = self.new_machine(context)
            unit = self.log.unit = machine.task.unit
            try:
                finished = self.serve(machine, self.spec.profiles)
            except StaleProfile as error:
                logger.warning("%s: measuring it again", error)
                machine.stop()
                machine = self.new_machine(context)
                finished = self.serve(machine, None)
            self.log.phase = WorkerPhase.STOP
            machine.stop()
            self.log.phase = WorkerPhase.STOPPED
        except (Stopped, PlanError) as error:
            finished = False
            if machine is not None:
                machine.stop()
            if isinstance(error, PlanError):
                return outcome(Cause.DOES_NOT_FIT, str(error))
        except BaseException as error:  # SystemExit included: the job failed, and the outcome has the reason
            self.log.step_seq = 0  # the step is over, so the rest is not an overrun of it
            with contextlib.suppress(OSError, ValueError):  # the task has closed it
                print(task_traceback(error), end="", file=sys.stderr)
            reason = why_failed(error, machine.callback if machine else "", context)
            if machine is not None:
                with contextlib.suppress(BaseException):
                    machine.stop()
            return outcome(Cause.FAILED, reason)
        if finished:
            checkpoint.discard(self.directory)
            return outcome(Cause.FINISHED)
        saved = checkpoint.exists(self.directory)
        if self._measures and not self.log.work_done:
            then = Then.MEASURED_SAVED if saved else Then.MEASURED_RESTARTS
        else:
            then = Then.SAVED if saved else Then.RESTARTS
        return outcome(Cause.CROWDED if self._crowded else Cause.STOPPED, then=then)

    def new_machine(self, context: TaskContext) -> TaskMachine:
        """Load the task, without calling ``create``, and return its machine; TaskError if there is no such task."""
        spec, enter = self.spec, None
        if spec.device.startswith("cuda"):
            from megatron.fill.device import cuda

            enter = cuda.Entrance(spec.device, spec.limits, spec.sharing)
        task = load_task(spec.work.task or "", spec.work.search)
        if isinstance(task, ImperativeTask):
            from megatron.fill.worker.driven import Driven

            return TaskMachine(Driven(task, enter or (lambda: None)), context)  # its own process calls ``enter``
        machine = TaskMachine(task, context)
        machine.enter = enter or machine.enter
        return machine

    def serve(self, machine: TaskMachine, profiles: tuple[JobProfile, ...] | None) -> bool:
        """Create the task and run its steps; True if it is finished.  Without ``profiles``, its nodes are measured.

        Raises:
            StaleProfile: the task's nodes are not those of the profiles.
            PlanError: no configuration of it fits the bubbles.
            Stopped: the worker was asked to stop before the first step.
        """
        pacer = None
        if not self.device.preemptive:
            pacer = Pacer(self.pages, self._stopping, self.device)
            machine.task.context.aside = pacer.aside
        loop = StepLoop(machine, self.pages, self._stopping, self.device, pacer)
        saver = Saver(machine, self.directory, self.spec.checkpoint_s, self.log, loop.turn)
        plans: NodeRun | None = None
        if isinstance(machine.task, NodeTask):
            from megatron.fill.worker.nodes import NodeRun

            self._measures = profiles is None
            plans = NodeRun(self.spec, machine.task, profiles, loop, self.board)
            if not plans.choose():
                return False
        elif profiles:  # otherwise the first steps would have no estimate
            loop.estimators.expect([node.duration_ns for node in profiles[0].nodes])
        self.log.phase = WorkerPhase.CREATE
        self.log.ready_ns = time.monotonic_ns()
        machine.create(self.spec.work.args)
        saver.load()
        if plans is not None:
            plans.configure()
        self.log.phase = WorkerPhase.INIT
        with loop.turn("init()"):
            machine.init()
        self.log.total_work = machine.total_work()
        if plans is not None:
            plans.begin()
        loop.between = partial(self._between, saver, plans)
        loop.attend = partial(self._attend, saver, machine)
        self.log.phase = WorkerPhase.ASLEEP
        try:
            finished = loop.run()
        except Stopped:  # while it waited to change its configuration, between two iterations
            finished = False
        if not finished:
            saver.save()
        return finished

    def _between(self, saver: Saver, plans: NodeRun | None) -> None:
        saver.save_if_due()
        if plans is not None:
            plans.follow()

    def _attend(self, saver: Saver, machine: TaskMachine) -> None:
        """Carry out requests of the agent: save the task, give memory back."""
        saver.save_if_wanted()
        if (wanted_bytes := self.log.wanted_bytes) is not None:
            self._crowded = not machine.shrink(wanted_bytes) or self._crowded
            self.log.wanted_bytes = None

    def _stopping(self) -> bool:
        return self._crowded or self.asked_to_stop()


def _write_at_once() -> None:
    """Have each line that the job prints leave its process, and a crash leave a traceback, also in processes below.

    A line costs a write to a pipe, a few us.  To write after each step would lose the lines of a step that hangs or
    crashes, which are the ones that tell where.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # sys.stderr is so by itself
    faulthandler.enable()


def main(parent: str, channel_fd: str, ahead: str, _run_dir: str, kind: Callable[..., Worker] = Worker) -> None:
    """Run the worker's first process; the arguments are those of ``WorkerProcess``."""
    host.die_with_parent(int(parent))
    host.adopt_orphans()
    _write_at_once()
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
    code = kind(spec, fds[0], channel).run()
    end_descendants()  # without a process namespace, processes of the job may have become children of this one
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:  # this process ends by the same signal
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))
