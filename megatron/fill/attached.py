"""The observers of a training that the patches call: of its start, offloading, held receives, writers and spans.

Bubbles are reported to the bus instead (``hooks``).
"""

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


class Lifecycle(Protocol):
    """Observer of the training's start."""

    def on_parse(self, args: Namespace) -> None:
        """Called when the command line has been parsed.

        Raises:
            ConfigError: a ``--fill-*`` flag has a wrong value; the training must not start.
        """

    def on_start(self, info: RankInfo, args: Namespace) -> None:
        """Called when Megatron is initialised: its arguments are parsed and its process groups exist.

        Raises:
            RunTaken: the run folder is in use; raised on every rank, and the training must not continue.
        """


class OffloadAdvice(Protocol):
    """Decides where the optimizer's state is kept between steps."""

    def offload_pays(self, gained_bytes: int, lost_ns: int, iteration_ns: int) -> bool:
        """Return True to keep offloading it to the host, given the memory gained and the time lost per iteration."""


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
    """Optional observers of a training, in addition to the bubbles' listener."""

    lifecycle: Lifecycle | None = None
    offload: OffloadAdvice | None = None
    waits: HeldReceives | None = None
    figures: Callable[[], Mapping[str, float]] | None = None  # returns the figures of the run that are known
    spans: Callable[[int], None] | None = None  # called inside Megatron's span of the iteration, with its number

    def parsed(self, args: Namespace) -> None:
        """Call ``Lifecycle.on_parse``."""
        if self.lifecycle is not None:
            self.lifecycle.on_parse(args)

    def started(self, info: RankInfo, args: Namespace) -> None:
        """Call ``Lifecycle.on_start``; an error other than ``RunTaken`` is logged, and the training continues."""
        if self.lifecycle is not None:
            try:
                self.lifecycle.on_start(info, args)
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

    def offload_pays(self, gained_bytes: int, lost_ns: int, iteration_ns: int) -> bool:
        """Return ``OffloadAdvice.offload_pays``; False without an adviser."""
        return self.offload is not None and self.offload.offload_pays(gained_bytes, lost_ns, iteration_ns)

    def wait_usually(self) -> None:
        """Stop holding receives, permanently."""
        waits, self.waits = self.waits, None
        if waits is not None:
            waits.release()


attached = Attached()
