"""The process of one side task: ``python -m megatron.fill.runtime.worker SPEC`` (started by the agent only)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import psutil

from megatron.fill.device import cuda, host
from megatron.fill.errors import FillError
from megatron.fill.gate import SharedGateReader
from megatron.fill.runtime import checkpoint
from megatron.fill.runtime.loop import StepLoop
from megatron.fill.runtime.spec import Outcome, WorkerSpec
from megatron.fill.runtime.steplog import StepLog, WorkerPhase
from megatron.fill.sidetask.base import SideTask, TaskContext
from megatron.fill.sidetask.imperative import StoppedCommand
from megatron.fill.sidetask.loader import load_task
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.types import BubbleUse, JobState

_COMMAND_GUARD_NS = 500_000  # a command is stopped this long before the predicted end of the bubble


class Worker:
    """Runs one job to its end, or until the main job is over."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.directory = Path(spec.directory)
        self.gate = SharedGateReader(spec.gate_fd)
        self.log = StepLog(spec.log_fd)
        self._stop = False
        signal.signal(signal.SIGTERM, self._on_term)

    def run(self) -> Outcome:
        """Do the job; never raises."""
        return self._run_command() if self.spec.command is not None else self._run_task()

    def _on_term(self, number: int, frame: object) -> None:
        self._stop = True

    def _stopping(self) -> bool:
        return self._stop

    def _run_task(self) -> Outcome:
        context = TaskContext(self.spec.name, self.directory, self.spec.device, self.spec.memory_bytes)
        machine: TaskMachine | None = None
        unit = SideTask.unit
        try:
            machine = TaskMachine(load_task(self.spec.task or "", tuple(self.spec.search)), context)
            unit = machine.task.unit
            finished = self._run_machine(machine)
            self.log.phase = WorkerPhase.STOP
            resumable = False if finished else self._save(machine)
            machine.stop()
        except BaseException as error:  # SystemExit included: whatever it was, the job failed and says why
            traceback.print_exc()
            checkpoint.discard(self.directory)
            reason = _reason(error, machine.callback if machine else "", self.spec.memory_bytes)
            if machine is not None:
                with contextlib.suppress(BaseException):
                    machine.stop()
            return Outcome(JobState.FAILED, reason, unit, context.total_work, context.result)
        if finished:
            checkpoint.discard(self.directory)
            return Outcome(JobState.SUCCEEDED, "", unit, context.total_work, context.result)
        reason = "the main job ended first"
        if resumable:
            reason += "; goes on from its checkpoint in the same run folder"
        return Outcome(JobState.STOPPED, reason, unit, context.total_work, context.result)

    def _run_machine(self, machine: TaskMachine) -> bool:
        self.log.phase = WorkerPhase.CREATE
        machine.create(self.spec.args)
        state = checkpoint.load(self.directory)
        if state is not None:
            machine.load(state)
        self.log.phase = WorkerPhase.INIT
        if self.spec.device.startswith("cuda"):
            cuda.cap_memory(self.spec.device, self.spec.memory_bytes)
        machine.init()
        self.log.phase = WorkerPhase.ASLEEP
        return StepLoop(machine, self.gate, self.log, self._stopping).run()

    def _save(self, machine: TaskMachine) -> bool:
        state = machine.state_dict()
        if state is None:
            return False
        checkpoint.save(self.directory, state)
        return True

    def _run_command(self) -> Outcome:
        # This process only watches the clock, and must get the core back when the bubble ends; the command itself
        # yields to the main job.
        host.run_at_normal_priority()
        try:
            command = StoppedCommand(self.spec.command or [], self.directory, self._prepare_command)
        except FillError as error:
            return Outcome(JobState.FAILED, str(error), "seconds")
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the command's end interrupts the wait
        try:
            code = self._run_in_bubbles(command)
        finally:
            command.kill()
        if code is None:
            return Outcome(JobState.STOPPED, "the main job ended first", "seconds")
        if code == 0:
            return Outcome(JobState.SUCCEEDED, "", "seconds")
        ended = f"was ended by {_signal_name(-code)}" if code < 0 else f"exited with status {code}"
        return Outcome(JobState.FAILED, f"the command {ended}; see output.log", "seconds")

    def _prepare_command(self) -> None:
        host.yield_to_main_job(self.spec.cpus)
        host.die_with_parent(os.getppid())

    def _run_in_bubbles(self, command: StoppedCommand) -> int | None:
        seq, ran_ns = 0, 0
        self.log.phase = WorkerPhase.ASLEEP
        while not (self.gate.ended or self._stop):
            bubble = self.gate.wait(seq)
            if bubble is None:
                continue
            seq = bubble.seq
            start_ns = time.monotonic_ns()
            remaining_ns = bubble.deadline_ns - _COMMAND_GUARD_NS - start_ns
            if remaining_ns <= 0:
                continue
            self.log.enter_bubble(seq)
            self.log.phase = WorkerPhase.STEP
            command.resume()
            while self.gate.is_open(seq) and not self._stop and command.poll() is None:
                left_ns = start_ns + remaining_ns - time.monotonic_ns()
                if left_ns <= 0:
                    break
                self.gate.wait_change(seq, left_ns)
            command.pause()
            end_ns = time.monotonic_ns()
            ran_ns = end_ns - start_ns
            self.log.step_ended(start_ns, end_ns, ran_ns / 1e9, bubble.alone)
            overrun_ns = max(0, end_ns - (self.gate.closed_ns(seq) or end_ns))
            use = BubbleUse(seq, start_ns - bubble.opened_ns, ran_ns - overrun_ns, overrun_ns, 1)
            self.log.leave_bubble(use, bubble.alone)
            self.log.phase = WorkerPhase.ASLEEP
            if command.poll() is not None:
                return command.exit_code
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _reason(error: BaseException, callback: str, memory_bytes: int | None) -> str:
    where = f" in {callback}()" if callback else ""
    if isinstance(error, SystemExit):
        return f"the task called sys.exit({error.code!r}){where}"
    if isinstance(error, FillError):
        return str(error)
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, MemoryError) or "can't allocate memory" in message or "out of memory" in message:
        cap = f"over its cap of {memory_bytes / 2**20:.0f} MiB" if memory_bytes else "out of memory"
        peak = psutil.Process().memory_info().rss / 2**20
        return f"{cap}{where}, with {peak:.0f} MiB resident: {message}"
    return f"{message}{where}"


def _end_children() -> None:
    """Nothing that the task started outlives it."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()


def main() -> None:
    spec = WorkerSpec.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    host.die_with_parent(spec.parent)
    host.adopt_orphans()
    host.yield_to_main_job(spec.cpus)
    host.cap_memory(spec.memory_bytes)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    os.chdir(spec.directory)
    outcome = Worker(spec).run()
    outcome.write(Path(spec.directory))
    _end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that a task left behind must not keep the process


if __name__ == "__main__":
    main()
