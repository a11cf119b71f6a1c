"""The side tasks of the benchmarks."""

from __future__ import annotations

import time
from typing import Any

from megatron.fill.sidetask.base import SideTask
from megatron.fill.sidetask.loader import load_task

TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("examples.tasks.digits:DigitsTraining", {"epochs": 0}),
    "pagerank": ("examples.tasks.pagerank:PageRank", {"repeat": 0}),
}
JOBS = [{"name": name, "task": task, "args": args} for name, (task, args) in TASKS.items()]
DEVICE_JOB = {"task": "scripts.benchmarks.sidetasks:DeviceStep"}  # for a rank with a device of its own


class CpuStep(SideTask):
    """A step that uses the CPU for ``step_ms`` of thread time."""

    def create(self, step_ms: float = 2.4) -> None:
        self._step_ns = int(step_ms * 1e6)

    def run_next_step(self) -> None:
        end_ns = time.thread_time_ns() + self._step_ns
        while time.thread_time_ns() < end_ns:
            pass


class DeviceStep(SideTask):
    """A step that takes ``step_ms`` of a device of its own, and none of the rank's core."""

    def create(self, step_ms: float = 2.4) -> None:
        self._step_s = step_ms / 1e3

    def run_next_step(self) -> None:
        time.sleep(self._step_s)


class Metered(SideTask):
    """Another task, of which it reports ``device_s``: the CPU time of its steps, for which they had the device."""

    def create(self, task: str, args: dict[str, Any]) -> None:
        self._task: SideTask = load_task(task)
        self._task.context = self.context
        self._used_ns = 0
        self._task.create(**args)

    def init(self) -> None:
        self._task.init()

    def start(self) -> None:
        self._task.start()

    def pause(self) -> None:
        self._task.pause()

    def run_next_step(self) -> float | None:
        before_ns = time.process_time_ns()
        try:
            return self._task.run_next_step()
        finally:
            self._used_ns += time.process_time_ns() - before_ns

    def stop(self) -> None:
        self._task.stop()
        self.context.report(device_s=self._used_ns / 1e9)


def tasks_of(step_ms: float | None) -> list[tuple[str, dict[str, Any]]]:
    """A task for each of two ranks, by path and arguments.

    Args:
        step_ms: of steps that use the CPU for so long and do nothing else; None for digits training and PageRank.
    """
    return (
        list(TASKS.values())
        if step_ms is None
        else [("scripts.benchmarks.sidetasks:CpuStep", {"step_ms": step_ms})] * 2
    )
