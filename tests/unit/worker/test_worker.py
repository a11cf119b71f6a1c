"""What a worker says of a job that the main job's end cut short."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.device.port import Limits
from megatron.fill.errors import TaskError
from megatron.fill.pages.steplog import StepLog, create_log
from megatron.fill.sidetask.base import SideTask, TaskContext
from megatron.fill.sidetask.loader import load_task
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.status import Cause, Then
from megatron.fill.work import Work
from megatron.fill.worker import checkpoint
from megatron.fill.worker.pacing import StepDevice, Stopped
from megatron.fill.worker.spec import Outcome, WorkerSpec
from megatron.fill.worker.worker import TaskRun
from tests.support.fakes import FakeGate, shared_pages, worker_spec


class Bench(TaskRun):
    """A task that does nothing but what is said."""

    def __init__(self, directory: Path, measures: bool, work: float) -> None:
        super().__init__(spec_of(directory), *shared_pages(FakeGate()), lambda: True, StepDevice(preemptive=True))
        self.now_measures, self.work = measures, work

    def serve(self, machine: TaskMachine, profiles: Any) -> bool:
        self._measures = self.now_measures
        self.log.step_ended(0, 1, self.work, alone=False)
        return False


def spec_of(directory: Path) -> WorkerSpec:
    return worker_spec(directory, Work("tests.unit.worker.test_worker:Counting"), checkpoint_s=1e9)


@pytest.mark.parametrize(
    ("measures", "work", "then"),
    [
        (False, 0.0, Then.RESTARTS),
        (True, 3.0, Then.RESTARTS),
        (True, 0.0, Then.MEASURED_RESTARTS),
    ],
)
def test_a_job_that_was_only_measured_says_so_and_what_avoids_it(tmp_path, measures, work, then):
    outcome = Bench(tmp_path, measures, work).run()
    assert outcome == Outcome(Cause.STOPPED, then=then)


class Counting(SideTask):
    def state_dict(self) -> dict[str, Any]:
        return {"counted": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_a_job_that_is_stopped_while_it_waits_to_change_over_is_saved(tmp_path, monkeypatch):
    def stopped(_: object) -> bool:
        raise Stopped

    monkeypatch.setattr("megatron.fill.worker.worker.StepLoop.run", stopped)
    run = TaskRun(spec_of(tmp_path), *shared_pages(FakeGate()), lambda: False, StepDevice(preemptive=True))
    assert not run.serve(TaskMachine(Counting(), TaskContext("job", tmp_path)), None)
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    assert saved["task"] == {"counted": 7}


class Nonsense(SideTask):
    """A task that returns what it is given, or that is its exception."""

    given: Any = None

    def create(self) -> None:
        total: Any = self.given if isinstance(self.given, tuple) else 3
        self.context.total_work = total

    def run_next_step(self) -> Any:
        if isinstance(self.given, BaseException):
            raise self.given
        return self.given


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Numbered(SideTask):
    unit = 7  # type: ignore[assignment]

    def run_next_step(self) -> None: ...


@pytest.mark.parametrize("given", [float("nan"), float("inf"), -1, 10**400, "three", "3", (1,)])
def test_work_that_is_no_amount_fails_the_job_and_is_named(given):
    machine = TaskMachine(Nonsense(), TaskContext("job", Path()))
    machine.task.given = given  # type: ignore[attr-defined]
    machine.create({})
    machine.init()
    machine.start()
    with pytest.raises(TaskError, match=r"returned .*expected the work done as a number, or None"):
        machine.run_next_step()


def test_a_total_that_is_no_amount_fails_the_job_and_is_named(tmp_path):
    machine = TaskMachine(Nonsense(), TaskContext("job", tmp_path))
    machine.task.given = ("many",)  # type: ignore[attr-defined]
    run = TaskRun(spec_of(tmp_path), *shared_pages(FakeGate()), lambda: True, StepDevice(preemptive=True))
    with pytest.raises(TaskError, match=r"total_work is \('many',\); expected a number, or None"):
        run.serve(machine, None)


@pytest.mark.parametrize("given", ["a", -3, 1.5, None])
def test_a_next_node_that_is_no_number_of_a_kind_fails_the_job_and_is_named(given):
    machine = TaskMachine(Nonsense(), TaskContext("job", Path()))
    machine.create({})
    machine.init()
    machine.start()
    machine.task.next_node = given
    named = rf"next_node is {given!r} after run_next_step\(\); expected the number of a kind of step, from 0"
    with pytest.raises(TaskError, match=named):
        machine.run_next_step()


def test_an_error_with_a_text_of_megabytes_is_told_by_its_beginning():
    log = StepLog(create_log())
    Outcome(Cause.FAILED, "ValueError: " + "x" * 3_000_000).leave(log)
    left = Outcome.left(log)
    assert left is not None
    assert left.cause is Cause.FAILED
    assert left.detail.startswith("ValueError: xxx")


def test_results_that_nobody_could_read_are_refused_where_they_are_reported(tmp_path):
    context = TaskContext("job", tmp_path)
    context.report(accuracy=0.5)
    with pytest.raises(ValueError, match=r"results have 90000.. bytes; expected at most 8388608, and files for more"):
        context.report(weights="x" * 9_000_000)
    assert context.result == {"accuracy": 0.5}


def test_results_that_cannot_be_written_are_kept_and_said_once(tmp_path, caplog):
    context = TaskContext("job", tmp_path)
    (tmp_path / "result.json").mkdir()  # as a full disk, it cannot be replaced by a file
    for steps in (1, 2):
        context.report(steps=steps)
    assert context.result == {"steps": 2}
    assert len(caplog.records) == 1
    (tmp_path / "result.json").rmdir()
    context.report(loss=0.5)
    assert json.loads((tmp_path / "result.json").read_text()) == {"steps": 2, "loss": 0.5}


def test_an_error_without_a_text_is_told_by_its_kind(tmp_path, monkeypatch):
    def failing(*_: object) -> bool:
        raise Mute

    monkeypatch.setattr(TaskRun, "serve", failing)
    run = TaskRun(spec_of(tmp_path), *shared_pages(FakeGate()), lambda: True, StepDevice(preemptive=True))
    assert run.run().detail == "Mute: it has no text, as its __str__() fails"


@pytest.mark.parametrize(
    ("device", "memory_bytes", "expected"),
    [
        ("cpu", 1 << 50, "an allocation was refused within its cap of 1073741824 MiB, with a peak of "),
        ("cpu", 1 << 20, "over its cap of 1 MiB, with a peak of "),
        ("cuda:0", 1 << 50, "over its cap of 1073741824 MiB, with a peak of "),  # the peak is of host memory
        ("cpu", None, "out of memory, with a peak of "),
    ],
)
def test_memory_that_is_refused_within_the_cap_is_told_so(tmp_path, monkeypatch, device, memory_bytes, expected):
    def failing(*_: object) -> bool:
        raise MemoryError

    monkeypatch.setattr(TaskRun, "serve", failing)
    spec = replace(spec_of(tmp_path), device=device, limits=Limits(memory_bytes))
    run = TaskRun(spec, *shared_pages(FakeGate()), lambda: True, StepDevice(preemptive=True))
    detail = run.run().detail
    assert detail.startswith(expected)
    assert detail.endswith(" MiB: MemoryError")


def test_a_task_that_has_closed_its_output_fails_with_its_reason(tmp_path, monkeypatch):
    def failing(*_: object) -> bool:
        raise ValueError("x")

    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(TaskRun, "serve", failing)
    monkeypatch.setattr("sys.stderr", closed)
    run = TaskRun(spec_of(tmp_path), *shared_pages(FakeGate()), lambda: True, StepDevice(preemptive=True))
    assert run.run().detail == "ValueError: x"


def test_a_unit_that_is_no_text_is_named():
    with pytest.raises(TaskError, match="unit is 7; expected text, such as 'samples'"):
        load_task("tests.unit.worker.test_worker:Numbered")
