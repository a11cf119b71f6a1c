"""What a worker says of a job that the main job's end cut short."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fill.runtime.spec import Outcome
from megatron.fill.runtime.steplog import StepLog, create_log
from megatron.fill.runtime.worker import Worker
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.types import JobState


class Bench(Worker):
    """A worker whose task does nothing but what is said."""

    def __init__(self, directory: Path, measures: bool, work: float) -> None:
        self.spec: Any = SimpleNamespace(context=lambda: TaskContext("job", directory))
        self.directory = directory
        self.log = StepLog(create_log())
        self._crowded = self._measures = False
        self.now_measures, self.work = measures, work

    def _new_machine(self, context: Any) -> Any:
        return SimpleNamespace(task=SimpleNamespace(unit="samples"), stop=lambda: None)

    def _run_machine(self, machine: Any, context: Any, spec: Any) -> bool:
        self._measures = self.now_measures
        self.log.step_ended(0, 1, self.work, alone=False)
        return False


@pytest.mark.parametrize(
    ("measures", "work", "said"),
    [
        (False, 0.0, ""),
        (True, 3.0, ""),
        (True, 0.0, "it was only measured so far, which pipefill profile JOBS.yaml --store STORE does beforehand; "),
    ],
)
def test_a_job_that_was_only_measured_says_so_and_what_avoids_it(tmp_path, measures, work, said):
    outcome = Bench(tmp_path, measures, work)._run_task()
    assert outcome == Outcome(JobState.QUEUED, f"{said}it begins again from its start", False, "samples")
