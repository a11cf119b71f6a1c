"""A thread of the rank that checks every ten seconds that the training moves, publishes it, and warns if it does not.

It is outside the training's path, and reads values that the listener keeps anyway.  In a hang the training itself
cannot report.  A stopped process cannot check either; then ``pipefill status`` sees that the latest check is old.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron.fill.pages.board import LOOK_S, Pulse
from megatron.fill.rank.listener import RankListener
from megatron.fill.types import RankInfo

logger = logging.getLogger("pipefill")

_S = 1e9


@dataclass(eq=False, repr=False)
class StillnessWatch:
    """Checks a rank periodically, until its listener's end."""

    rank: RankListener
    info: RankInfo
    show: Callable[[Pulse], None]  # publishes the result of a check
    clock: Callable[[], int] = time.monotonic_ns

    def __post_init__(self) -> None:
        self._began_ns = self._moved_ns = self.clock()
        self._longest_ns = self._still_ns = 0
        self._said = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="stillness", daemon=True).start()

    def _run(self) -> None:
        while not self.rank.over.wait(LOOK_S):
            self.look()

    def look(self) -> Pulse:
        """Check once: publish the result, and log a warning when the training stops moving or moves again."""
        rank, info, now_ns = self.rank, self.info, self.clock()
        moved_ns = rank.moved_ns or self._began_ns
        if moved_ns > self._moved_ns:  # a pause that ended counts as usual, for example a checkpoint
            self._longest_ns = max(self._longest_ns, self._still_ns)
        self._longest_ns = max(self._longest_ns, rank.longest_ns)
        self._moved_ns, self._still_ns = moved_ns, now_ns - moved_ns
        waits = rank.waits
        kind, since_ns = waits if waits is not None else (None, 0)
        pulse = Pulse(now_ns, moved_ns, rank.iteration, self._longest_ns, kind, since_ns, info.stage, info.stages)
        self.show(pulse)
        still_s = pulse.still_s(now_ns)
        if still_s and not self._said:
            logger.warning(
                "rank %d (stage %d): nothing has moved for %.0f s, and the longest before was %.1f s: it %s; "
                "pipefill status tells of all ranks",
                info.rank,
                info.stage,
                still_s,
                self._longest_ns / _S,
                pulse.waits_for(now_ns),
            )
        elif self._said and not still_s:
            logger.warning("rank %d (stage %d): the training moves again", info.rank, info.stage)
        self._said = bool(still_s)
        return pulse
