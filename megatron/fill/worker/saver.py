"""Saves a task periodically and when it stops, and restores it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.pages.steplog import Saving, StepLog, WorkerPhase
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.worker import checkpoint
from megatron.fill.worker.pacing import TakesTurn, at_once

logger = logging.getLogger("pipefill.checkpoint")


@dataclass(eq=False, repr=False)
class Saver:
    """The checkpoints of one task; one that cannot be written (a full disk) is tried again at the next interval."""

    machine: TaskMachine
    directory: Path
    every_s: float
    log: StepLog
    turn: TakesTurn = at_once

    def __post_init__(self) -> None:
        self._resumable = True
        self._due_s = time.monotonic() + self.every_s
        self._saved_steps = -1

    def load(self) -> None:
        """Restore the newest checkpoint, if there is one; errors as of ``checkpoint.load``."""
        self.log.resumable = self.machine.resumable
        if checkpoint.exists(self.directory):
            self.log.phase = WorkerPhase.LOAD  # to read it may take seconds, when torch is imported for it
        saved = checkpoint.load(self.directory)
        if saved is None:
            return
        self.machine.load(saved["task"])
        self.log.phase = WorkerPhase.CREATE
        self.log.base_work = saved["work_done"]
        self.log.checkpoint_s = saved["saved_s"]
        logger.info("goes on from its checkpoint at %g %s", saved["work_done"], self.machine.task.unit)

    def save_if_due(self) -> None:
        if self._resumable and time.monotonic() >= self._due_s:
            self.save()

    def save_if_wanted(self) -> None:
        """Save the task if the agent requests it, before a move to another rank."""
        if self.log.saving is Saving.WANTED:
            self.save()
            saved = self._resumable and self._saved_steps == self.log.step_count
            self.log.saving = Saving.SAVED if saved else Saving.FAILED

    def save(self) -> None:
        """Save the task, if it is resumable and has done a step since it was last saved."""
        if not self._resumable or self._saved_steps == self.log.step_count:
            return
        self.log.phase = WorkerPhase.SAVE
        with self.turn("state_dict()", must=True):
            state = self.machine.state_dict()
        self.log.phase = WorkerPhase.ASLEEP
        if state is None:
            self._resumable = self.log.resumable = False
            return
        now_s = time.time()
        # A task resumes at the beginning of its iteration.
        work_done = self.log.base_work + self.log.whole_work
        try:
            checkpoint.save(self.directory, {"task": state, "work_done": work_done, "saved_s": now_s})
        except (OSError, ImportError, MemoryError) as error:  # torch may not fit under a small memory cap
            logger.warning("no checkpoint was written, the job goes on: %s", error)
        else:
            self.log.checkpoint_s = now_s
            self._saved_steps = self.log.step_count
        self._due_s = time.monotonic() + self.every_s
