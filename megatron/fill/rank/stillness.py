"""A thread of the rank that checks every ten seconds that the training moves, publishes it, and warns if it does not.

It is outside the training's path, and reads values that the listener keeps anyway.  In a hang the training itself
cannot report.  A stopped process cannot check either; then ``pipefill status`` sees that the latest check is old.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from megatron.fill.pages.board import LOOK_S, Pulse
from megatron.fill.types import BubbleKind, RankInfo

logger = logging.getLogger("pipefill")

_S = 1e9


class Moving(Protocol):
    """The values that are checked (``RankListener``)."""

    moved_ns: int
    iteration: int

    @property
    def longest_ns(self) -> int: ...

    @property
    def waits(self) -> tuple[BubbleKind, int] | None: ...


class StillnessWatch:
    """Checks a rank periodically; ``show`` publishes the result of a check."""

    def __init__(
        self, rank: Moving, info: RankInfo, show: Callable[[Pulse], None], clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._rank = rank
        self._info = info
        self._show = show
        self._clock = clock
        self._began_ns = self._moved_ns = clock()
        self._longest_ns = self._still_ns = 0
        self._said = False
        self._over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="stillness", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self.look()

    def look(self) -> Pulse:
        """Check once: publish the result, and log a warning when the training stops moving or moves again."""
        rank, now_ns = self._rank, self._clock()
        moved_ns = rank.moved_ns or self._began_ns
        if moved_ns > self._moved_ns:  # a pause that ended counts as usual, for example a checkpoint
            self._longest_ns = max(self._longest_ns, self._still_ns)
        self._longest_ns = max(self._longest_ns, rank.longest_ns)
        self._moved_ns, self._still_ns = moved_ns, now_ns - moved_ns
        waits = rank.waits
        kind, since_ns = waits if waits is not None else (None, 0)
        info = self._info
        pulse = Pulse(now_ns, moved_ns, rank.iteration, self._longest_ns, kind, since_ns, info.stage, info.stages)
        self._show(pulse)
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
