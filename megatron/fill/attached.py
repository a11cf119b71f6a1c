"""The observers of a training that the patches call, but for bubbles, which are reported to the bus (``hooks``)."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from megatron.fill.errors import RunTaken
from megatron.fill.types import RankInfo

logger = logging.getLogger(__name__)


class HeldReceives(Protocol):
    """Holds the pipeline's receives until their data is ready (--fill-free-waits)."""

    def announce(self, receiver: int) -> None:
        """Announce to ``receiver`` that the current stream's last result is about to be sent to it."""

    def receive(self, sender: int, *, hold: bool = True) -> AbstractContextManager[None]:
        """Return a context to post a receive from ``sender`` in; it is held, or without ``hold`` only counted."""

    def release(self) -> None:
        """Stop holding receives."""


@dataclass(slots=True)
class Attached:
    """Optional observers of a training."""

    # Called with the parsed command line; ConfigError, for a wrong ``--fill-*`` flag, ends the training.
    on_parse: Callable[[Namespace], None] | None = None
    # Called before Megatron's process groups are made, again if a process trains again (--inprocess-restart).
    on_restart: Callable[[], None] | None = None
    # Called when Megatron's process groups exist; RunTaken, raised on every rank, ends the training.
    on_start: Callable[[RankInfo, Namespace], None] | None = None
    # Returns True to keep offloading the optimizer's state to the host, given the bytes gained, and the time lost per
    # iteration and the iteration's time in ns.
    offload_pays: Callable[[int, int, int], bool] | None = None
    waits: HeldReceives | None = None
    figures: Callable[[], Mapping[str, float]] | None = None  # returns the figures of the run that are known
    spans: Callable[[int], None] | None = None  # called inside Megatron's span of the iteration, with its number

    def started(self, info: RankInfo, args: Namespace) -> None:
        """Call ``on_start``; an error other than ``RunTaken`` is logged, and the training continues."""
        if self.on_start is not None:
            try:
                self.on_start(info, args)
            except RunTaken:
                raise
            except Exception:
                logger.exception("PipeFill failed to start; the training goes on without it")

    def iteration_began(self, iteration: int) -> None:
        """Call ``spans``; after an error it is not called any more."""
        if self.spans is not None:
            try:
                self.spans(iteration)
            except Exception:
                self.spans = None
                logger.exception("bubbles are not linked to the training's own spans any more; the training goes on")

    def wait_usually(self) -> None:
        waits, self.waits = self.waits, None
        if waits is not None:
            waits.release()


attached = Attached()
