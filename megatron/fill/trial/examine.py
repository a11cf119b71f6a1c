"""The examination of a job without running it: whether it can be imported, and accepts its arguments."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.base import SideTask, TaskContext
from megatron.fill.sidetask.blame import task_traceback
from megatron.fill.sidetask.imperative import why_no_program
from megatron.fill.sidetask.loader import load_task
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.sidetask.nodes import NodeTask


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of examining a job before it runs."""

    error: str = ""  # reason why it cannot run; empty if none was found
    raised: bool = False  # True if the job's own code failed; False if something does not exist or does not fit
    trace: str = ""  # traceback of that code
    nodes: bool = False
    resumable: bool = False


def examine_task(path: str, args: Mapping[str, Any], search: Sequence[str]) -> Examined:
    """Import and construct ``module:Class`` as a worker does, and compare ``args`` with the signature of ``create``."""
    try:
        task = load_task(path, tuple(search))
        check_args(task, args)
    except TaskError as error:
        cause = error.__cause__
        if cause is None or _is_absent(cause, path.partition(":")[0]):
            return Examined(str(error))
        return Examined(str(error), True, task_traceback(error))
    machine = TaskMachine(task, TaskContext(path, Path()))
    return Examined(nodes=isinstance(task, NodeTask), resumable=machine.resumable)


def check_args(task: SideTask, args: Mapping[str, Any]) -> None:
    """Check, by its signature, that ``create`` accepts these arguments; TaskError, with its parameters, if not."""
    name = type(task).__name__
    if type(task).create is SideTask.create:
        if args:
            raise TaskError(f"{name} takes no args; got {', '.join(args)}")
        return
    try:
        signature = inspect.signature(task.create)
    except (TypeError, ValueError):  # it is not written in Python
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise TaskError(f"args do not fit {name}.create(): {error}; it takes {takes}") from None


def examine_command(command: Sequence[str]) -> Examined:
    """Check that the program exists, looked up in this process's working folder and PATH."""
    if shutil.which(command[0]) is None:
        return Examined(why_no_program(command[0]))
    return Examined()


def _is_absent(cause: BaseException, module: str) -> bool:
    """True if the task's own module is missing, and not one that it imports."""
    missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
    return bool(missing) and f"{module}.".startswith(f"{missing}.")
