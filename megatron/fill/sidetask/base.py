"""``SideTask``: the base class of side tasks (FreeRide, section 4)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from megatron.fill.linux.files import write_text
from megatron.fill.untrusted import MOST_JSON_BYTES, to_json

RESULT = "result.json"  # in the job's folder


class TaskState(StrEnum):
    """FreeRide's states of a side task, in order."""

    SUBMITTED = "SUBMITTED"
    CREATED = "CREATED"  # in host memory
    PAUSED = "PAUSED"  # in device memory, between bubbles
    RUNNING = "RUNNING"  # inside a bubble
    STOPPED = "STOPPED"


@dataclass(slots=True)
class TaskContext:
    """The runtime's interface to a task, as ``self.context``.

    Attributes:
        name: name of the job.
        directory: folder of the job, for all files that the task writes.
        device: torch device of the task: ``"cpu"`` or ``"cuda:0"``.
        memory_bytes: cap on the task's memory; None for no cap.
        measuring: True if the task is only measured and then discarded: it should write nothing outside ``directory``.
        index: number of the instance, from 0, of a job with a count; 0 without a count.
        count: number of instances; 1 without a count.
        logger: logger that writes to the job's output.
        total_work: total work in the task's unit; None if unknown.
        result: values collected by ``report``.
        aside: context manager for long work of ``init`` without the device: inside, it is not paused between bubbles.
    """

    name: str
    directory: Path
    device: str = "cpu"
    memory_bytes: int | None = None
    measuring: bool = False
    index: int = 0
    count: int = 1
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("pipefill.task"))
    total_work: float | None = None
    result: dict[str, Any] = field(default_factory=dict)
    aside: Callable[[], AbstractContextManager[None]] = nullcontext
    _written: bool = field(default=True, init=False)  # the results are in their file

    def report(self, **values: Any) -> None:
        """Record results (say, ``accuracy=0.97``); the last value of each name is in the report.

        Where the disk is full, they are kept in memory, and written with those of the next call.

        Raises:
            TypeError: a value cannot be written as JSON.  (A number that is not finite becomes null.)
            ValueError: a value is too large, or nested too deep.
        """
        merged = self.result | values
        text = to_json(merged)
        if (size := len(text.encode())) > MOST_JSON_BYTES:
            raise ValueError(f"the results have {size} bytes; expected at most {MOST_JSON_BYTES}, and files for more")
        self.result = merged
        try:
            write_text(self.directory / RESULT, text)
        except OSError as error:
            if self._written:
                self.logger.warning("results cannot be written now, and are kept: %s", error)
            self._written = False
        else:
            self._written = True


class SideTask:
    """Work done in small steps inside pipeline bubbles.

    Subclass it and override ``run_next_step``; override the rest as needed.  The callbacks are called in this order,
    all from one thread:

        create(**args) -> init() -> [start() -> run_next_step() ... -> pause()] ... -> stop()

    ``create`` and ``init`` run once, outside bubbles, at idle priority; on a GPU ``init`` and ``state_dict`` run within
    bubbles and are paused between them.  ``start``, ``run_next_step`` and ``pause`` run inside bubbles.  The runtime
    measures each step, and begins a step only if it is expected to end before the bubble does, so make steps short (a
    few milliseconds) and of even length.

    Attributes:
        unit: unit of work: samples, edges, images, tokens, ...
        next_node: kind of the next step, for tasks with several kinds of steps; the runtime expects steps of the same
            kind to take about equally long.
        idle: True if there is nothing to do now: the rest of the bubble is left to other jobs, and a step is tried
            again in the next bubble.
        context: the runtime's interface to the task, set before ``create``.
    """

    unit: ClassVar[str] = "steps"
    next_node: int = 0
    idle: bool = False
    context: TaskContext

    def create(self, *args: Any, **kwargs: Any) -> None:
        """SUBMITTED -> CREATED: load all data into host memory.

        Override it with keyword parameters: they are the ``args`` of the jobs file.
        """
        if args or kwargs:
            raise TypeError(f"{type(self).__name__} takes no args; got {', '.join(kwargs)}")

    def init(self) -> None:
        """CREATED -> PAUSED: move to ``self.context.device``."""

    def start(self) -> None:
        """PAUSED -> RUNNING: a bubble has opened."""

    def run_next_step(self) -> float | None:
        """Do one small step and return the work it did, in ``unit``; None counts as 1.

        Raises:
            StopIteration: there is nothing left to do; the job has succeeded.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override run_next_step()")

    def pause(self) -> None:
        """RUNNING -> PAUSED: the bubble is about to end."""

    def shrink(self, memory_bytes: int) -> bool:
        """Reduce memory to at most ``memory_bytes`` from now on, since the training needs it; called between bubbles.

        Returns:
            True if the task does.  If not, the job is saved and stopped, and resumes when and where there is memory.
        """
        return False

    def stop(self) -> None:
        """-> STOPPED: release everything; called once, also after a failure in another callback."""

    def state_dict(self) -> dict[str, Any] | None:
        """The state needed to resume: tensors, NumPy arrays, numbers, strings and containers of them.

        None if the task cannot be resumed.  The job fails if anything else is in it, which could not be loaded.
        It is written before the next step, so tensors in host memory need not be copied.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``; called between ``create`` and ``init``."""
        raise NotImplementedError(f"{type(self).__name__} has a state_dict() but no load_state_dict()")
