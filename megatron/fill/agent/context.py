"""The objects that all parts of one agent share."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from megatron.fill.agent.claims import Claims
from megatron.fill.agent.ledger import AttemptLedger
from megatron.fill.agent.memory import DeviceMemory
from megatron.fill.agent.ranking import Ranking
from megatron.fill.agent.spec import AgentSpec
from megatron.fill.device.port import Limits, WorkerDevice
from megatron.fill.pages.baton import Baton
from megatron.fill.pages.board import CycleBoardReader
from megatron.fill.pages.control import ControlPage
from megatron.fill.pages.gate import SharedGateReader
from megatron.fill.status import Cause
from megatron.fill.store.values import Job


class Attendant(Protocol):
    """A part of a wing that runs beside an agent."""

    def keep(self) -> None:
        """Called every few seconds; an error is logged."""

    def shown(self, job: str) -> AbstractContextManager[None]:
        """Return a context that a running job is in; ``job`` is the name of its folder."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class AgentContext:
    """The agent's shared objects, for any thread; only the resident seat's thread drops the baton."""

    spec: AgentSpec
    name: str  # the device's name in the store
    gate: SharedGateReader
    board: CycleBoardReader
    control: ControlPage
    control_fd: int  # read-only descriptor of the control page, for workers
    baton: Baton
    device: WorkerDevice
    memory: DeviceMemory
    claims: Claims
    ranking: Ranking
    ledger: AttemptLedger
    attendants: tuple[Attendant, ...] = ()
    guard: int | None = None  # pid of the agent's parent: the rank's warden, or a keeper; None for none
    # Set once the guard says that the rank has died, or has itself died.
    orphaned: threading.Event = field(default_factory=threading.Event)

    @property
    def over(self) -> Cause:
        """The cause of the end of all jobs here: the training is over, or the agent's guard died; NONE before."""
        if self.gate.ended:
            return Cause.TRAINING_ENDED
        if not self.orphaned.is_set():
            return Cause.NONE
        if self.guard in (None, os.getppid()):
            return Cause.TRAINING_ENDED
        return Cause.KEEPER_DIED if self.guard == self.spec.parent else Cause.WARDEN_DIED

    @property
    def dismissed(self) -> bool:
        """True if this agent got SIGTERM and its guard lives: unless the rank ends, another agent is to follow."""
        return self.orphaned.is_set() and not self.gate.ended and self.guard == os.getppid()

    def limits(self, job: Job) -> Limits:
        """Return the limits of a worker for this job; NotStarted if there is too little memory for it now."""
        return replace(self.spec.limits, memory_bytes=self.memory.cap(job.work.memory_bytes, self.board.read()))

    @property
    def worker_fds(self) -> tuple[int, ...]:
        """Descriptors of the pages that every worker maps."""
        return self.spec.gate_fd, self.spec.board_fd, self.control_fd, self.baton.fd
