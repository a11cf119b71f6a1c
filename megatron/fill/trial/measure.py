"""Measures one job alone: ``python -m megatron.fill.trial.measure SPEC``, a process with the job's memory and cap."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.device import cuda
from megatron.fill.errors import FillError
from megatron.fill.linux import host
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.sidetask.imperative import ImperativeTask
from megatron.fill.sidetask.loader import load_task
from megatron.fill.sidetask.nodes import NodeTask
from megatron.fill.spec import Spec
from megatron.fill.trial.steptimes import measure_steps, write_step_times
from megatron.fill.work import Work
from megatron.fill.worker.profiler import measure_nodes, write_profile

NO_STEPS = 3  # exit status of a job that has none


@dataclass(frozen=True, slots=True)
class MeasureSpec(Spec):
    """The job to measure."""

    name: str
    work: Work
    device: str
    directory: str  # folder for its profile


def measure(spec: MeasureSpec) -> bool:
    """Measure the nodes of a node task in all configurations, or the steps of another; False for an ImperativeTask.

    An ImperativeTask is one long run without steps, which is measured by running it in bubbles (``trial``).

    Raises:
        TaskError: it runs in no configuration, or does no work.
    """
    work = spec.work
    index, count = work.instance
    directory = Path(spec.directory)
    context = TaskContext(spec.name, directory, spec.device, work.memory_bytes, index=index, count=count)
    task = load_task(work.task or "", work.search)
    if isinstance(task, ImperativeTask):
        return False
    if isinstance(task, NodeTask):
        found = measure_nodes(work, context)
        assert found is not None  # there is no training that could end first
        write_profile(context, found)
    else:
        found, kinds = measure_steps(task, context, work.args)
        write_profile(context, found)
        write_step_times(directory, kinds)
    return True


def main() -> None:
    spec = MeasureSpec.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if spec.device == "cpu":
        host.cap_memory(spec.work.memory_bytes)
    else:  # the cap is on device memory: CUDA's libraries take gigabytes of host memory
        cuda.cap_memory(spec.device, spec.work.memory_bytes)
    os.chdir(spec.directory)
    try:
        sys.exit(0 if measure(spec) else NO_STEPS)
    except FillError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
