"""The phases of a worker, and the states of a save that its agent requests; both are in the step log."""

from __future__ import annotations

from enum import IntEnum


class WorkerPhase(IntEnum):
    """The callback or state that a worker is in; the agent reports it when the worker dies."""

    STARTING = 0
    CREATE = 1
    INIT = 2
    ASLEEP = 3
    START = 4
    STEP = 5
    PAUSE = 6
    STOP = 7
    LOAD = 8
    SAVE = 9
    STOPPED = 10

    @property
    def callback(self) -> str:
        return _NAMES.get(self, f"{self.name.lower()}()")


_NAMES = {
    WorkerPhase.STARTING: "while starting",
    WorkerPhase.ASLEEP: "between bubbles",
    WorkerPhase.STEP: "run_next_step()",
    WorkerPhase.LOAD: "load_state_dict()",
    WorkerPhase.SAVE: "state_dict()",
    WorkerPhase.STOPPED: "after it had stopped",
}


class Saving(IntEnum):
    """The state of a save that the agent requests before anything else."""

    NONE = 0
    WANTED = 1
    SAVED = 2
    FAILED = 3
