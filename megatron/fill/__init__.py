"""PipeFill: other work in the pipeline bubbles of Megatron-LM training."""

from megatron.fill.errors import ConfigError, FillError, GateError, PatchError, TaskError
from megatron.fill.sidetask.base import SideTask, TaskContext, TaskState
from megatron.fill.types import Bubble, BubbleKind, JobState

__all__ = [
    "Bubble",
    "BubbleKind",
    "ConfigError",
    "FillError",
    "GateError",
    "JobState",
    "PatchError",
    "SideTask",
    "TaskContext",
    "TaskError",
    "TaskState",
]
