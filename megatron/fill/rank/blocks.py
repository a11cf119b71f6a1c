"""Blocks of iterations with and without filling, which a run compares (``--fill-paired-blocks``)."""

from __future__ import annotations

from collections.abc import Callable

from megatron.fill.types import fills_block

MOST_SETTLING = 200  # number of iterations after the warm-up after which paired blocks begin in any case


class Blocks:
    """Counts the iterations of one rank.

    The blocks begin when the jobs of all ranks have settled: a GPU's job sets itself up in bubbles.  The iteration
    in the middle of a block without filling is not watched: its bubbles are not recorded, so its time shows what
    watching costs.

    Args:
        warmup: number of iterations before the first block.
        size: number of iterations in a block; 0 for no blocks.
        settled: returns True once the jobs of all ranks have settled.

    Attributes:
        past_warmup: number of the present iteration, from 0 at the end of the warm-up; negative before.
        number: its block, counted from the end of the warm-up; -1 while jobs settle, and without blocks.
        watched: True if its bubbles are recorded.
        begun: True once jobs have settled, so that measurements count, with and without blocks (``settling``).
    """

    __slots__ = ("_settled", "_size", "begun", "number", "past_warmup", "watched")

    def __init__(self, warmup: int, size: int, settled: Callable[[], bool]) -> None:
        self._size = size
        self._settled = settled
        self.begun = False
        self.past_warmup = -warmup - 1
        self.number = -1
        self.watched = True

    @property
    def settling(self) -> bool:
        """True while blocks have not begun because jobs are still setting themselves up."""
        return bool(self._size) and not self.begun

    def iteration_started(self) -> None:
        self.past_warmup = past_warmup = self.past_warmup + 1
        size = self._size
        if past_warmup < 0:
            return
        # Only at the start of a pair, so that all ranks are in the same block even if one is notified later.
        if not self.begun and past_warmup % (2 * size or 1) == 0:
            self.begun = self._settled() or past_warmup >= MOST_SETTLING
        if self.begun and size:
            self.number = past_warmup // size
            # False in the middle of a block without filling: that iteration is compared with its neighbours.
            self.watched = size < 3 or past_warmup % size != size // 2 or fills_block(self.number)
