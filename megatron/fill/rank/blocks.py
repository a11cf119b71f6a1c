"""Which iterations are filled, and which are watched, where a run compares them in blocks (--fill-paired-blocks)."""

from __future__ import annotations

from collections.abc import Callable

from megatron.fill.types import fills_block

MOST_SETTLING = 200  # iterations after the warm-up, after which paired blocks begin whatever the jobs do


class Blocks:
    """Counts the iterations of one rank.

    The blocks begin when the jobs of all ranks have settled: a GPU's job sets itself up in bubbles, so its start would
    fall into the first of them.  The iteration in the middle of a block without filling is not watched: no bubble of it
    is heard of, so that it shows what watching costs.

    Args:
        warmup: iterations before the first block.
        size: iterations in a block; 0 for no blocks.
        settled: whether the jobs of all ranks have.

    Attributes:
        past_warmup: the number of the present iteration, from 0 at the end of the warm-up; negative before.
        number: its block, counted from the end of the warm-up; -1 while jobs settle, and where there are no blocks.
        watched: whether the bubbles of the present iteration are heard of.
        begun: whether jobs have settled: what comes now counts, in blocks and without (``settling``).
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
        """Whether there will be blocks, and the jobs are still setting themselves up."""
        return bool(self._size) and not self.begun

    def iteration_started(self) -> None:
        self.past_warmup = past_warmup = self.past_warmup + 1
        size = self._size
        if past_warmup < 0:
            return
        # At the start of a pair: so all ranks are in the same block, even if one hears later than the others.
        if not self.begun and past_warmup % (2 * size or 1) == 0:
            self.begun = self._settled() or past_warmup >= MOST_SETTLING
        if self.begun and size:
            self.number = past_warmup // size
            # Between two others of its block, which it is compared with.
            self.watched = size < 3 or past_warmup % size != size // 2 or fills_block(self.number)
