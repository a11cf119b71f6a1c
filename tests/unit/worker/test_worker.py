"""What a worker says of a job that the main job's end cut short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.fill.sidetask.base import SideTask, TaskContext
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
