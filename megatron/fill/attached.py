"""Who is attached to a training: the patches tell it that the training starts, and ask it about the optimizer's state.

Its bubbles are told to the bus (``hooks``).
"""

from __future__ import annotations

import logging
from argparse import Namespace
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from megatron.fill.errors import RunTaken
from megatron.fill.types import RankInfo

logger = logging.getLogger(__name__)


class Lifecycle(Protocol):
    """What begins with the training."""

    def on_parse(self, args: Namespace) -> None:
        """The command line is parsed.

        Raises:
            ConfigError: a ``--fill-*`` flag has a wrong value; the run must not start.
        """

    def on_start(self, info: RankInfo, args: Namespace) -> None:
        """Megatron is initialised: its arguments are parsed and its process groups exist.

        Raises:
            RunTaken: on every rank; the run must not go on.
        """


class OffloadAdvice(Protocol):
    """Who decides where the optimizer's state is between steps."""

    def offload_pays(self, gained_bytes: int, lost_ns: int, iteration_ns: int) -> bool:
        """Whether to go on moving it to the host, given what that gains and costs an iteration."""


class HeldReceives(Protocol):
    """Who holds the pipeline's receives up until their data is there (--fill-free-waits)."""

    def announce(self, receiver: int) -> None:
        """What the current stream computed last is about to be sent to this rank."""

    def receive(self, sender: int, *, hold: bool = True) -> AbstractContextManager[None]:
        """A receive from this rank is posted inside; it is held up, or only counted."""

    def release(self) -> None:
        """Nothing is held up any more."""


@dataclass(slots=True)
class Attached:
    """Who hears of the training beside the bubbles' listener; None for nobody."""

    lifecycle: Lifecycle | None = None
    offload: OffloadAdvice | None = None
    waits: HeldReceives | None = None

    def parsed(self, args: Namespace) -> None:
        """As ``Lifecycle.on_parse``."""
        if self.lifecycle is not None:
            self.lifecycle.on_parse(args)

    def started(self, info: RankInfo, args: Namespace) -> None:
        """As ``Lifecycle.on_start``; what else fails there does not harm the training."""
        if self.lifecycle is not None:
            try:
                self.lifecycle.on_start(info, args)
            except RunTaken:
                raise
            except Exception:
                logger.exception("PipeFill failed to start; the training goes on without it")

    def offload_pays(self, gained_bytes: int, lost_ns: int, iteration_ns: int) -> bool:
        """As ``OffloadAdvice.offload_pays``."""
        return self.offload is not None and self.offload.offload_pays(gained_bytes, lost_ns, iteration_ns)

    def wait_usually(self) -> None:
        """Hold no receive up any more."""
        waits, self.waits = self.waits, None
        if waits is not None:
            waits.release()


attached = Attached()
