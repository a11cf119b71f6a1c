"""The settle phase: it ends once the first job of every rank has done a step.

From then on paired blocks of iterations may begin, and the harvest counts: on a GPU a job sets itself up in bubbles
(its context, its model, its first kernels).  The agents agree through empty files next to their records, one for each
rank whose job has settled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.pages.control import ControlPage

logger = logging.getLogger("pipefill.agent")

FOLDER = "settled"  # next to the records of agents and ranks
IDLE_LOOKS = 20  # number of looks in a row without any job after which a rank has settled too


@dataclass(eq=False, repr=False)
class Settling:
    """Notifies one rank when the jobs of all ranks have settled."""

    records: Path  # the folder for the records of this start of the training, which the ranks share
    rank: int
    ranks: int
    stepped: Callable[[], bool | None]  # returns True once a job of this rank has done a step; None without a job
    page: ControlPage

    def __post_init__(self) -> None:
        self._mine = self.records / FOLDER / str(self.rank)
        self._idle = 0  # number of looks in a row without any job
        self._said = False

    def look(self) -> bool:
        """Check once, and return True if the jobs of all ranks have settled; OSError if that cannot be told now."""
        stepped = self.stepped()
        self._idle = self._idle + 1 if stepped is None else 0
        if not (self._said or stepped or self._idle >= IDLE_LOOKS):
            return False
        self._mine.parent.mkdir(parents=True, exist_ok=True)  # again, in case it was deleted
        self._mine.touch()
        if not self._said:
            logger.info("the jobs of this rank have settled")
        self._said = True
        if len(os.listdir(self._mine.parent)) < self.ranks:
            return False
        self.page.settle()
        logger.info("the jobs of all %d ranks have settled", self.ranks)
        return True
