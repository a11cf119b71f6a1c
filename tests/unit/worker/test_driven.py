"""Imperative tasks: one long run, interrupted and continued from outside."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.device.port import Limits
from megatron.fill.errors import TaskError
from megatron.fill.sidetask import ImperativeTask, TaskContext
from megatron.fill.sidetask.blame import task_traceback
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.work import Work
from megatron.fill.worker.driven import Driven
from megatron.fill.worker.pacing import StepDevice
from megatron.fill.worker.worker import TaskRun
from tests.support.fakes import FakeGate, shared_pages, worker_spec


class Counts(ImperativeTask):
    """Counts, and writes down which callback was called when."""

    unit = "turns"

    def create(self, turns: int = 10**9, fail_at: int = -1, exits: bool = False) -> None:
        self.turns, self.fail_at, self.exits = turns, fail_at, exits
        self.done = 0
        self.context.total_work = float(turns)
        self.note("create")

    def note(self, what: str) -> None:
        with (self.context.directory / "calls").open("a") as file:
            file.write(f"{what}\n")

    def init(self) -> None:
        self.note("init")

    def start(self) -> None:
        self.note("start")

    def pause(self) -> None:
        self.note(f"pause {self.done}")

    def stop(self) -> None:
        self.note(f"stop {self.done}")

    def run_gpu_workload(self) -> None:
        while self.done < self.turns:
            self.done += 1
            if self.done == self.fail_at:
                raise ValueError("no more")
            if self.exits:
                os._exit(3)
            time.sleep(0.0005)
            self.synchronize(1)
        self.context.report(turns=self.done)


class Stubborn(Counts):
    """Its callbacks take their time, so that pauses are asked for while they run."""

    def start(self) -> None:
        time.sleep(0.01)
        super().start()


def begin(task: ImperativeTask, directory: Path, **args: Any) -> TaskMachine:
    machine = TaskMachine(Driven(task, lambda: None), TaskContext("test", directory))
    machine.create(args)
    machine.init()
    return machine


def run_on(machine: TaskMachine) -> list[float]:
    """The work of each step, until there is no more."""
    work = []
    try:
        while True:
            work.append(machine.run_next_step())
    except StopIteration:
        return work


def calls(directory: Path) -> list[str]:
    return (directory / "calls").read_text().splitlines()


def test_it_runs_while_it_may_and_only_then(tmp_path):
    machine = begin(Counts(), tmp_path)
    assert machine.task.unit == "turns"
    assert machine.task.context.total_work == 1e9
    done = []
    for _ in range(3):
        machine.start()
        done.append(sum(machine.run_next_step() for _ in range(20)))
        machine.pause()
        said = calls(tmp_path)
        time.sleep(0.02)
        assert calls(tmp_path) == said  # nothing goes on
    machine.stop()
    assert min(done) > 0
    paused = [int(line.split()[1]) for line in calls(tmp_path) if line.startswith("pause")]
    assert paused == sorted(paused)
    stopped = int(calls(tmp_path)[-1].split()[1])
    assert stopped == paused[-1] >= sum(done) > paused[-2]
    names = [line.split()[0] for line in calls(tmp_path)]
    assert names == ["create", "init", *["start", "pause"] * 3, "stop"]


def test_it_comes_to_its_end(tmp_path):
    machine = begin(Counts(), tmp_path, turns=5)
    machine.start()
    work = run_on(machine)
    machine.pause()
    machine.stop()
    assert sum(work) == 5
    assert machine.task.context.result == {"turns": 5}
    assert json.loads((tmp_path / "result.json").read_text()) == {"turns": 5}
    assert calls(tmp_path) == ["create", "init", "start", "stop 5"]


def test_it_may_end_while_a_pause_is_asked_for(tmp_path):
    machine = begin(Counts(), tmp_path, turns=1)
    machine.start()
    time.sleep(0.05)  # it has ended, and nobody has heard of it yet
    machine.pause()
    machine.start()
    assert machine.run_next_step() == 1
    with pytest.raises(StopIteration):
        machine.run_next_step()
    machine.pause()
    machine.stop()


def test_a_pause_may_come_at_any_moment(tmp_path):
    machine = begin(Stubborn(), tmp_path)
    for _ in range(10):
        machine.start()
        machine.pause()
    machine.stop()
    names = [line.split()[0] for line in calls(tmp_path)]
    assert names == ["create", "init", *["start", "pause"] * 10, "stop"]


def test_without_a_unit_of_its_own_time_counts(tmp_path):
    class Sleeps(ImperativeTask):
        def run_gpu_workload(self) -> None:
            while True:
                time.sleep(0.001)

    machine = begin(Sleeps(), tmp_path)
    machine.start()
    before = time.monotonic()
    seconds = sum(machine.run_next_step() for _ in range(10))
    assert 0.01 <= seconds <= time.monotonic() - before
    machine.pause()
    machine.stop()


def test_a_failure_of_the_workload_is_the_jobs(tmp_path, capfd):
    machine = begin(Counts(), tmp_path, fail_at=3)
    machine.start()
    with pytest.raises(TaskError, match=r"ValueError: no more in run_gpu_workload\(\)") as caught:
        run_on(machine)
    assert task_traceback(caught.value) == ""  # its own process has printed it
    machine.stop()
    assert "in run_gpu_workload" in capfd.readouterr().err
    assert calls(tmp_path)[-1] == "stop 3"


class Hungry(ImperativeTask):
    """Asks for more memory than there is."""

    def run_gpu_workload(self) -> None:
        bytearray(1 << 62)


def test_memory_that_the_workload_is_refused_is_told_in_its_own_words(tmp_path, capfd):
    machine = begin(Hungry(), tmp_path)
    machine.start()
    with pytest.raises(
        TaskError, match=r"^out of memory in run_gpu_workload\(\), with a peak of .*: MemoryError$"
    ) as caught:
        run_on(machine)
    assert task_traceback(caught.value) == ""  # its own process has printed it
    machine.stop()
    assert "bytearray(1 << 62)" in capfd.readouterr().err


def test_a_process_that_ends_without_a_word_is_named(tmp_path):
    machine = begin(Counts(), tmp_path, exits=True)
    machine.start()
    with pytest.raises(TaskError, match=r"the process of run_gpu_workload\(\) exited with status 3"):
        run_on(machine)
    machine.stop()


def test_wrong_arguments_are_those_of_create(tmp_path):
    with pytest.raises(TaskError, match=r"TypeError: .*unexpected keyword argument 'pages' in create\(\)"):
        begin(Counts(), tmp_path, pages=3)


def test_one_that_does_not_stop_is_killed(tmp_path):
    class Deaf(Counts):
        def run_gpu_workload(self) -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
            while True:
                time.sleep(1)

    machine = TaskMachine(Driven(Deaf(), lambda: None, stop_s=0.05), TaskContext("test", tmp_path))
    machine.create({})
    machine.init()
    machine.start()
    machine.run_next_step()
    pid = machine.task._pid  # type: ignore[attr-defined]
    machine.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_its_limits_are_entered_in_its_own_process_before_and_after_init(tmp_path):
    def enter() -> None:
        with (tmp_path / "calls").open("a") as file:
            file.write(f"enter {os.getpid()}\n")

    machine = TaskMachine(Driven(Counts(), enter), TaskContext("test", tmp_path))
    machine.create({})
    machine.init()
    pid = machine.task._pid  # type: ignore[attr-defined]
    machine.stop()
    assert pid != os.getpid()
    assert calls(tmp_path) == ["create", f"enter {pid}", "init", f"enter {pid}", "stop 0"]


def test_on_a_cpu_a_worker_enters_no_limits_of_a_gpu(tmp_path):
    work, limits = Work("tests.unit.worker.test_driven:Counts"), Limits(1 << 30)
    spec = worker_spec(tmp_path, work, limits=limits)
    run = TaskRun(spec, *shared_pages(FakeGate()), lambda: False, StepDevice(preemptive=True))
    machine = run.new_machine(TaskContext("job", tmp_path))
    machine.create({"turns": 1})
    machine.init()  # with a GPU's limits, PyTorch would look for a driver here
    machine.stop()
