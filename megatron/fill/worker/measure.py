"""Measures one job alone, outside any training: ``python -m megatron.fill.worker.measure SPEC``.

Each job gets a process of its own, so that the process's memory is the job's, and a cap on it ends with the process.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.device import cuda
from megatron.fill.device.meter import fingerprint, meter
from megatron.fill.errors import FillError, TaskError
from megatron.fill.linux import host
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.sidetask.imperative import ImperativeTask
from megatron.fill.sidetask.loader import load_task
from megatron.fill.sidetask.nodes import NodeTask
from megatron.fill.spec import Spec
from megatron.fill.work import Work
from megatron.fill.worker.profiler import MeasuringMachine, measure_nodes, write_profile
from megatron.fill.worker.steptimes import measure_steps, write_step_times

NO_STEPS = 3  # exit status


class NoStepsError(TaskError):
    """The job is one long run without steps; it is measured by running it in bubbles (``trial``)."""


@dataclass(frozen=True, slots=True)
class MeasureSpec(Spec):
    """The job to measure, and the folder for its profile (``directory``)."""

    name: str
    work: Work
    device: str
    directory: str


def measure(spec: MeasureSpec) -> None:
    """Measure the job: the nodes of a node task in all configurations, the steps of another task.

    Raises:
        NoStepsError: it is an ImperativeTask.
        TaskError: it runs in no configuration, or does no work.
    """
    meters = meter(spec.device)
    directory, device = Path(spec.directory), fingerprint(spec.device)
    work, task = spec.work, spec.work.task or ""
    index, count = work.instance
    context = TaskContext(spec.name, directory, spec.device, work.memory_bytes, index=index, count=count)
    first = load_task(task, work.search)
    if isinstance(first, ImperativeTask):
        raise NoStepsError(f"{task} is an ImperativeTask")
    if not isinstance(first, NodeTask):
        measured, kinds = measure_steps(first, context, work.args, meters)
        write_profile(directory, measured, device)
        write_step_times(directory, kinds)
        return

    def make(context: TaskContext) -> MeasuringMachine:
        loaded = load_task(task, work.search)
        assert isinstance(loaded, NodeTask)
        return MeasuringMachine(loaded, context, meters)

    found = measure_nodes(make, _run, context, work.args)
    assert found is not None  # there is no training that could end first
    write_profile(directory, found, device)


def _run(machine: MeasuringMachine) -> bool:
    machine.start()
    try:
        while True:
            machine.run_next_step()
    except StopIteration:
        return True
    finally:
        machine.pause()


def main() -> None:
    spec = MeasureSpec.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if spec.device == "cpu":
        host.cap_memory(spec.work.memory_bytes)
    else:  # the cap is on device memory: CUDA's libraries take gigabytes of host memory
        cuda.cap_memory(spec.device, spec.work.memory_bytes)
    os.chdir(spec.directory)
    try:
        measure(spec)
    except FillError as error:
        print(error, file=sys.stderr)
        sys.exit(NO_STEPS if isinstance(error, NoStepsError) else 2)


if __name__ == "__main__":
    main()
