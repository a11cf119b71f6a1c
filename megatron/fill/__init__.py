"""PipeFill: other work in the pipeline bubbles of Megatron-LM training."""

from typing import TYPE_CHECKING

from megatron.fill.lazy import lazily

if TYPE_CHECKING:
    from megatron.fill.errors import ConfigError, FillError, GateError, PatchError, TaskError
    from megatron.fill.hooks import bubble
    from megatron.fill.sidetask.base import SideTask, TaskContext, TaskState
    from megatron.fill.sidetask.imperative import ImperativeTask
    from megatron.fill.types import Bubble, BubbleKind, JobState
else:  # most processes of a job need few of them
    __getattr__ = lazily(
        __name__,
        {
            "errors": "ConfigError FillError GateError PatchError TaskError",
            "hooks": "bubble",
            "sidetask.base": "SideTask TaskContext TaskState",
            "sidetask.imperative": "ImperativeTask",
            "types": "Bubble BubbleKind JobState",
        },
    )

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
