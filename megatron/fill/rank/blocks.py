"""Blocks of iterations with and without filling, which a run compares (``--fill-paired-blocks``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.fill.types import MOST_SETTLING, fills_block


@dataclass(eq=False, repr=False)
class Blocks:
    """Counts the iterations of one rank.

    The blocks begin when the jobs of all ranks have settled: a GPU's job sets itself up in bubbles.  The iteration
    in the middle of a block without filling is not watched: its bubbles are not recorded, so its time shows what
    watching costs.
    """

    warmup: int  # number of iterations before the first block
    size: int  # number of iterations in a block; 0 for no blocks
    settled: Callable[[], bool]  # returns True once the jobs of all ranks have settled

    def __post_init__(self) -> None:
        # True once jobs have settled, so that measurements count, with and without blocks (``settling``).
        self.begun = False
        self.past_warmup = -self.warmup - 1  # number of the present iteration, from 0 at the end of the warm-up
        self.number = -1  # its block, counted from the end of the warm-up; -1 while jobs settle, and without blocks
        self.watched = True  # its bubbles are recorded

    @property
    def settling(self) -> bool:
        """True while blocks have not begun because jobs are still setting themselves up."""
        return bool(self.size) and not self.begun

    def iteration_started(self) -> None:
        self.past_warmup = past_warmup = self.past_warmup + 1
        size = self.size
        if past_warmup < 0:
            return
        # Only at the start of a pair, so that all ranks are in the same block even if one is notified later.
        if not self.begun and past_warmup % (2 * size or 1) == 0:
            self.begun = self.settled() or past_warmup >= MOST_SETTLING
        if self.begun and size:
            self.number = past_warmup // size
            # False in the middle of a block without filling: that iteration is compared with its neighbours.
            self.watched = size < 3 or past_warmup % size != size // 2 or fills_block(self.number)
