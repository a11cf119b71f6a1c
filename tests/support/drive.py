"""Takes a side task through its life without the runtime: every step at once, no bubbles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.fill.sidetask import SideTask, TaskContext
from megatron.fill.sidetask.machine import TaskMachine


def begin(task_class: type[SideTask], directory: Path, state: dict[str, Any] | None = None, **args: Any) -> TaskMachine:
    """A task ready for ``run_next_step``; it goes on from ``state`` if there is one."""
    directory.mkdir(parents=True, exist_ok=True)
    machine = TaskMachine(task_class(), TaskContext("test", directory))
    machine.create(args)
    if state is not None:
        machine.load(state)
    machine.init()
    machine.start()
    return machine


def finish(machine: TaskMachine) -> list[float]:
    """Run all steps that are left, then stop; the work that each of them did."""
    work = []
    try:
        while True:
            work.append(machine.run_next_step())
    except StopIteration:
        machine.pause()
        return work
    finally:
        machine.stop()


def drive[T: SideTask](task_class: type[T], directory: Path, **args: Any) -> T:
    """Run a task from create to stop."""
    machine = begin(task_class, directory, **args)
    finish(machine)
    return task_of(machine, task_class)


def task_of[T: SideTask](machine: TaskMachine, task_class: type[T]) -> T:
    assert isinstance(machine.task, task_class)
    return machine.task
