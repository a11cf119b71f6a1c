"""PipeFill: other work in the pipeline bubbles of Megatron-LM training."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.fill.errors import ConfigError, FillError, GateError, PatchError, TaskError
    from megatron.fill.hooks import bubble
    from megatron.fill.sidetask.base import SideTask, TaskContext, TaskState
    from megatron.fill.sidetask.imperative import ImperativeTask
    from megatron.fill.types import Bubble, BubbleKind, JobState

__all__ = [
    "Bubble",
    "BubbleKind",
    "ConfigError",
    "FillError",
    "GateError",
    "ImperativeTask",
    "JobState",
    "PatchError",
    "SideTask",
    "TaskContext",
    "TaskError",
    "TaskState",
    "bubble",
]
# The names of each module, which is imported when one of them is asked for: most processes of a job need few of them.
_MODULES = {
    "errors": ("ConfigError", "FillError", "GateError", "PatchError", "TaskError"),
    "hooks": ("bubble",),
    "sidetask.base": ("SideTask", "TaskContext", "TaskState"),
    "sidetask.imperative": ("ImperativeTask",),
    "types": ("Bubble", "BubbleKind", "JobState"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
