"""The state machine of a side task, which fixes the order of its callbacks (FreeRide, figure 5)."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable
from numbers import Integral
from typing import Any

from megatron.fill.errors import TaskError
from megatron.fill.profiles import is_amount
from megatron.fill.sidetask.base import SideTask, TaskContext, TaskState
from megatron.fill.sidetask.blame import end_forked


class TaskMachine:
    """The state machine of one task, which calls its callbacks.

    An exception of a callback is passed on unchanged; ``callback`` then names the callback that raised it.  A process
    that a callback has forked ends where it leaves the callback: it must not go on as a second worker.
    """

    def __init__(self, task: SideTask, context: TaskContext) -> None:
        self.task = task
        self.task.context = context
        self.state = TaskState.SUBMITTED
        self.callback = ""  # name of the callback that was called last
        # Called before and after ``init``, the first use of the device, which may be the first to import PyTorch.
        self.enter: Callable[[], None] = lambda: None
        self._pid = os.getpid()

    def create(self, args: dict[str, Any]) -> None:
        self._expect(TaskState.SUBMITTED, "create")
        self.call(self.task.create, **args)
        self.state = TaskState.CREATED

    def load(self, state: dict[str, Any]) -> None:
        self._expect(TaskState.CREATED, "load_state_dict")
        self.call(self.task.load_state_dict, state)

    def init(self) -> None:
        self._expect(TaskState.CREATED, "init")
        self.enter()
        self.call(self.task.init)
        self.enter()
        self._check_next_node()
        self.state = TaskState.PAUSED

    def start(self) -> None:
        self._expect(TaskState.PAUSED, "start")
        self.call(self.task.start)
        self.state = TaskState.RUNNING

    def run_next_step(self) -> float:
        """Run a step; return its work: StopIteration if nothing is left, TaskError for another value or next node."""
        self._expect(TaskState.RUNNING, "run_next_step")
        work = self.call(self.task.run_next_step)
        self._check_next_node()
        if work is None:
            return 1.0
        return _amount(work, "run_next_step() returned {}; expected the work done as a number, or None")

    def total_work(self) -> float | None:
        """Return the total work that the task has told; None if it has not; TaskError if that is no amount of work."""
        told = self.task.context.total_work
        return None if told is None else _amount(told, "total_work is {}; expected a number, or None")

    def pause(self) -> None:
        self._expect(TaskState.RUNNING, "pause")
        self.call(self.task.pause)
        self.state = TaskState.PAUSED

    def shrink(self, memory_bytes: int) -> bool:
        self._expect(TaskState.PAUSED, "shrink")
        return bool(self.call(self.task.shrink, memory_bytes))

    @property
    def resumable(self) -> bool:
        """True if the task implements ``state_dict`` and ``load_state_dict``."""
        mine = type(self.task)
        return mine.state_dict is not SideTask.state_dict and mine.load_state_dict is not SideTask.load_state_dict

    def state_dict(self) -> dict[str, Any] | None:
        self.callback = "state_dict"
        return self.call(self.task.state_dict)

    def stop(self) -> None:
        """Stop the task, from any state; a second call does nothing."""
        if self.state is TaskState.STOPPED:
            return
        self.callback = "stop"
        self.state = TaskState.STOPPED
        self.call(self.task.stop)

    def call[**P, T](self, code: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call code of the task."""
        try:
            return code(*args, **kwargs)
        finally:
            if os.getpid() != self._pid:
                end_forked(self.callback)

    def _check_next_node(self) -> None:
        node: Any = self.task.next_node
        if not isinstance(node, Integral) or node < 0:
            message = f"next_node is {reprlib.repr(node)} after {self.callback}()"
            raise TaskError(f"{message}; expected the number of a kind of step, from 0")

    def _expect(self, state: TaskState, callback: str) -> None:
        if self.state is not state:
            raise TaskError(f"{callback}() was called in state {self.state}; expected {state}")
        self.callback = callback


def _amount(given: Any, message: str) -> float:
    """Return an amount of work; TaskError for anything else, which readers of the step log take for no work at all."""
    try:
        amount = -1.0 if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError, OverflowError):
        amount = -1.0
    if not is_amount(amount):
        raise TaskError(message.format(reprlib.repr(given)))
    return amount
