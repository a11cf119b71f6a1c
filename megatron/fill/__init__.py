"""PipeFill: other work in the pipeline bubbles of Megatron-LM training."""

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
