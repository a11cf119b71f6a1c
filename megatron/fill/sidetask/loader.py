"""The import of a side task given as ``module:Class``."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from megatron.fill.errors import TaskError
from megatron.fill.sidetask.base import SideTask


def load_task(path: str, search: tuple[str, ...] = ()) -> SideTask:
    """Import and construct the side task ``module:Class``; TaskError if it is none, or one of the two fails.

    ``search`` has further folders in which to look for the module, after ``sys.path``.
    """
    module_name, _, class_name = path.partition(":")
    sys.path.extend(folder for folder in search if folder not in sys.path)
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # a module may raise anything, SystemExit included
        raise TaskError(f"importing {module_name} failed: {type(error).__name__}: {error}") from error
    found = getattr(module, class_name, None)
    if found is None:
        raise TaskError(f"{module_name} has no {class_name}{_instead(module)}")
    if not (isinstance(found, type) and issubclass(found, SideTask)):
        raise TaskError(f"{path} is not a SideTask: expected a subclass of megatron.fill.SideTask, found {found!r}")
    try:
        task = found()
    except Exception as error:
        raise TaskError(f"{path} cannot be constructed: {type(error).__name__}: {error}") from error
    if not isinstance(task.unit, str):
        raise TaskError(f"{path}: unit is {task.unit!r}; expected text, such as 'samples'")
    return task


def _instead(module: ModuleType) -> str:
    """A hint with the side tasks that a module defines itself, for a class that it does not have."""
    found = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, SideTask) and value.__module__ == module.__name__
    ]
    return f"; it has {', '.join(sorted(found))}" if found else ""
