"""Side tasks: the interface their authors write to, and the tasks that come with PipeFill."""

from megatron.fill.sidetask.base import SideTask, TaskContext, TaskState

__all__ = ["SideTask", "TaskContext", "TaskState"]
