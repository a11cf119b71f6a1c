"""Side tasks: the interface for their authors, and the tasks that come with PipeFill."""

from megatron.fill.sidetask.base import SideTask, TaskContext, TaskState
from megatron.fill.sidetask.imperative import ImperativeTask

__all__ = ["ImperativeTask", "SideTask", "TaskContext", "TaskState"]
