"""Side tasks: the interface their authors write to, and the tasks that come with PipeFill."""

from megatron.fill.sidetask.base import SideTask, TaskContext, TaskState
from megatron.fill.sidetask.imperative import ImperativeTask

__all__ = ["ImperativeTask", "SideTask", "TaskContext", "TaskState"]
