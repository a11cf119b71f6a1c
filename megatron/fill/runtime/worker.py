"""The process of one side task (started by the agent only, by ``main``), and the process that holds it.

The first process waits for its job, reads the spec, maps the pages that it shares with the rank, and puts the job
behind the walls of its cage; it stays outside itself.  A task runs inside, with the pages as it found them: it has no
descriptor of those that it may only read, so it cannot open them anew.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron.fill.board import CycleBoardReader
from megatron.fill.control import ControlReader
from megatron.fill.device import host
from megatron.fill.device.emulated import BREATHER_NS, Executor, LaunchPage
from megatron.fill.device.port import Limits, mib
from megatron.fill.errors import FillError, PlanError, StaleProfile
from megatron.fill.gate import GateReader, SharedGateReader
from megatron.fill.runtime import checkpoint
from megatron.fill.runtime.baton import Baton, TailGate
from megatron.fill.runtime.command import CommandRun
from megatron.fill.runtime.confined import apply_environment, end_as, jail
from megatron.fill.runtime.loop import StepLoop
from megatron.fill.runtime.reap import end_descendants
from megatron.fill.runtime.saver import Saver
from megatron.fill.runtime.spec import Outcome, WorkerSpec
from megatron.fill.runtime.steplog import StepLog, WorkerPhase
from megatron.fill.sidetask.base import SideTask, TaskContext
from megatron.fill.sidetask.blame import task_traceback
from megatron.fill.sidetask.loader import load_task
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.sidetask.nodes import NodeTask
from megatron.fill.types import JobState

logger = logging.getLogger("pipefill.worker")

_MOST_PATH_BYTES = 1 << 14


class Worker:
    """Runs one job to its end, or until the main job is over."""

    def __init__(self, spec: WorkerSpec, log_fd: int, channel: socket.socket) -> None:
        self.spec = spec
        self.channel = channel
        self.directory = Path(spec.directory)
        self.gate = SharedGateReader(spec.gate_fd)
        self.board = CycleBoardReader(spec.board_fd)
        self.control = ControlReader(spec.control_fd)
        self.baton = Baton(spec.baton_fd)
        self.view: GateReader = TailGate(self.gate, self.baton) if spec.tail else self.gate
        self.log = StepLog(log_fd)
        for fd in (spec.gate_fd, spec.board_fd, spec.control_fd, spec.baton_fd, log_fd):
            os.close(fd)  # they stay mapped
        self._launches: LaunchPage | None = None
        self._stop = False
        self._crowded = False  # the main job needs the memory
        self._measures = False  # the job had no profile
        signal.signal(signal.SIGTERM, self._on_term)

    def hold(self) -> int:
        """Put the job into its cage and stay until it has ended; its exit code."""
        if self.spec.command is not None:
            self._run_command().leave(self.log)
            return 0
        if self.spec.emulate is not None:
            self._launches = LaunchPage()
        held = jail(self.spec, self.channel, self._inside)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # that is for the task
        if self._launches is not None and self.spec.emulate is not None:
            executor = Executor(self._launches, held.pid, self.spec.cpus, self.spec.emulate)
            executor.serve(lambda: held.poll() is not None)
        return held.wait()

    def _inside(self) -> None:
        """The task's process, from when it may begin."""
        apply_environment(self.spec.env)
        self._run_task().leave(self.log)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads that a task left behind must not keep the process

    def stopping(self) -> bool:
        """Whether the agent asked for the end."""
        return self._stop

    def _on_term(self, number: int, frame: object) -> None:
        self._stop = True

    def _run_command(self) -> Outcome:
        if not self.spec.tail:
            self.baton.hold()
        self.log.unit = "seconds"
        left = (lambda seq: None) if self.spec.tail else self.baton.pass_on
        return CommandRun(
            self.spec, self.channel, self.view, self.gate, self.log, self.stopping, left, self.control
        ).run()

    def _run_task(self) -> Outcome:
        machine: TaskMachine | None = None
        context = self.spec.context()
        unit = SideTask.unit
        try:
            machine = self._new_machine(context)
            unit = self.log.unit = machine.task.unit
            try:
                finished = self._run_machine(machine, context, self.spec)
            except StaleProfile as error:
                logger.warning("%s: measuring it again", error)
                machine.stop()
                machine = self._new_machine(context)
                finished = self._run_machine(machine, context, replace(self.spec, profiles=None))
            self.log.phase = WorkerPhase.STOP
            machine.stop()
            self.log.phase = WorkerPhase.STOPPED
        except PlanError as error:
            if machine is not None:
                machine.stop()
            return Outcome(JobState.QUEUED, str(error), True, unit, context.total_work, context.result)
        except BaseException as error:  # SystemExit included: whatever it was, the job failed and says why
            self.log.enter_bubble(0)  # the step is over; what follows is not its overrun
            print(task_traceback(error), end="", file=sys.stderr)
            reason = _reason(error, machine.callback if machine else "", self.spec.limits)
            if machine is not None:
                with contextlib.suppress(BaseException):
                    machine.stop()
            return Outcome(JobState.FAILED, reason, False, unit, context.total_work, context.result)
        if finished:
            checkpoint.discard(self.directory)
            return Outcome(JobState.SUCCEEDED, "", False, unit, context.total_work, context.result)
        only_measured = self._measures and not self.log.work_done
        reason = unfinished(checkpoint.exists(self.directory), only_measured)
        return Outcome(JobState.QUEUED, reason, False, unit, context.total_work, context.result, self._crowded)

    def _new_machine(self, context: TaskContext) -> TaskMachine:
        return TaskMachine(load_task(self.spec.task or "", tuple(self.spec.search)), context)

    def _run_machine(self, machine: TaskMachine, context: TaskContext, spec: WorkerSpec) -> bool:
        saver = Saver(machine, self.directory, spec.checkpoint_s, self.log)
        loop = StepLoop(
            machine,
            self.view,
            self.log,
            self.stopping,
            baton=None if spec.tail else self.baton,
            control=self.control,
            preempted=spec.device == "cpu" and self._launches is None,
        )
        if self._launches is not None:
            loop.launch, loop.land = self._launches.launch, self._launches.land
            loop.breather_ns = BREATHER_NS
        # What only some jobs need is imported for those only: every worker's start-up takes the main job's core.
        if spec.device.startswith("cuda"):
            from megatron.fill.device import cuda

            loop.settle = partial(cuda.settle, spec.device)
            for lacking in cuda.enter(spec.device, spec.limits, spec.sharing):
                logger.info("%s", lacking)
        plans = None
        if isinstance(machine.task, NodeTask):
            from megatron.fill.runtime.planned import NodeRun

            self._measures = spec.profiles is None
            plans = NodeRun(spec, machine.task, loop, self.view, self.board, self.log, self.stopping)
            if not plans.choose():
                return False
        self.log.phase = WorkerPhase.CREATE
        self.log.ready_ns = time.monotonic_ns()
        machine.create(spec.args)
        saver.load()
        if plans is not None:
            plans.configure()
        self.log.phase = WorkerPhase.INIT
        machine.init()
        self.log.total_work = context.total_work
        if plans is not None:
            plans.begin()

        def between() -> None:
            saver.save_if_due()
            if plans is not None:
                plans.follow()

        def attend() -> None:
            saver.save_if_wanted()
            wanted_bytes, self.log.wanted_bytes = self.log.wanted_bytes, None
            if wanted_bytes is not None and not machine.shrink(wanted_bytes):
                self._stop = self._crowded = True

        loop.between, loop.attend = between, attend
        self.log.phase = WorkerPhase.ASLEEP
        finished = loop.run()
        if not finished:
            saver.save()
        return finished


def unfinished(kept: bool, only_measured: bool) -> str:
    """What becomes of a job that the main job's end cut short.

    Args:
        kept: it left a checkpoint.
        only_measured: its profile was measured, and nothing else came of it.
    """
    then = "goes on from its checkpoint" if kept else "it begins again from its start"
    if not only_measured:
        return then
    return f"it was only measured so far, which pipefill profile JOBS.yaml --store STORE does beforehand; {then}"


def _reason(error: BaseException, callback: str, limits: Limits) -> str:
    where = f" in {callback}()" if callback else ""
    if isinstance(error, SystemExit):
        return f"the task called sys.exit({error.code!r}){where}"
    if isinstance(error, FillError):
        return str(error)
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, MemoryError) or "can't allocate memory" in message or "out of memory" in message:
        cap = f"over its cap of {mib(limits.memory_bytes)}" if limits.memory_bytes else "out of memory"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return f"{cap}{where}, with a peak of {mib(peak)}: {message}"
    return f"{message}{where}"


def main(parent: str, channel_fd: str, ahead: str, _run_dir: str) -> None:
    """The first process, from its first instruction to its last; its arguments are those that ``Holder`` gives."""
    host.die_with_parent(int(parent))
    host.adopt_orphans()
    # So that the agent's call to look at the shared pages interrupts a sleep.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for name in filter(None, ahead.split(",")):
        with contextlib.suppress(Exception):  # the job that needs it will say so
            importlib.import_module(name)
    channel = socket.socket(fileno=int(channel_fd))
    path, fds, _, _ = socket.recv_fds(channel, _MOST_PATH_BYTES, 1)
    if not fds:  # there was no job for it, and the agent has let it go
        return
    spec = WorkerSpec.from_json(Path(os.fsdecode(path)).read_text(encoding="utf-8"))
    os.environ.clear()
    os.environ.update(spec.environment)
    code = Worker(spec, fds[0], channel).hold()
    end_descendants()  # without a process namespace, what the job started may have come here
    end_as(code)
