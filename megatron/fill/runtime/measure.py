"""Measures one job by itself, outside any training: ``python -m megatron.fill.runtime.measure SPEC``.

A process of its own for each job: its memory is the job's, and a cap on it ends with it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.fill.device import cuda, host
from megatron.fill.device.meter import fingerprint, meter
from megatron.fill.errors import FillError, TaskError
from megatron.fill.runtime.profiler import MeasuringMachine, Profiler, write_profile
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.sidetask.loader import load_task
from megatron.fill.sidetask.nodes import NodeTask

NO_NODES = 3  # exit status


class NoNodesError(TaskError):
    """The job is a plain side task: it is measured by running it (``trial``)."""


@dataclass(frozen=True, slots=True)
class MeasureSpec:
    """What to measure, and where: the profile is left in ``directory``."""

    name: str
    task: str
    args: dict[str, Any]
    memory_bytes: int | None
    search: list[str]
    device: str
    directory: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def measure(spec: MeasureSpec) -> None:
    """Measure the job in all its configurations.

    Raises:
        NoNodesError: it is no NodeTask.
        TaskError: it runs in no configuration.
    """
    meters = meter(spec.device)

    def make(context: TaskContext) -> MeasuringMachine:
        task = load_task(spec.task, tuple(spec.search))
        if not isinstance(task, NodeTask):
            raise NoNodesError(f"{spec.task} is no NodeTask")
        return MeasuringMachine(task, context, meters)

    context = TaskContext(spec.name, Path(spec.directory), spec.device, spec.memory_bytes)
    profiler = Profiler(make, _run, context, spec.args)
    profiles = profiler.measure()
    assert profiles is not None  # nothing ends before the job does
    write_profile(Path(spec.directory), profiles, profiler, fingerprint(spec.device))


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
    spec = MeasureSpec(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    host.cap_memory(spec.memory_bytes)
    if spec.device.startswith("cuda"):
        cuda.cap_memory(spec.device, spec.memory_bytes)
    os.chdir(spec.directory)
    try:
        measure(spec)
    except FillError as error:
        print(error, file=sys.stderr)
        sys.exit(NO_NODES if isinstance(error, NoNodesError) else 2)


if __name__ == "__main__":
    main()
