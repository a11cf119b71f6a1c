"""The objects that all parts of one agent share."""

from __future__ import annotations

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
    orphaned: threading.Event = field(default_factory=threading.Event)  # set once the rank has died

    @property
    def over(self) -> bool:
        """True if the training is over or the rank has died."""
        return self.gate.ended or self.orphaned.is_set()

    def limits(self, job: Job) -> Limits:
        """Return the limits of a worker for this job; NotStarted if there is too little memory for it now."""
        return replace(self.spec.limits, memory_bytes=self.memory.cap(job.work.memory_bytes, self.board.read()))

    @property
    def worker_fds(self) -> tuple[int, ...]:
        """Descriptors of the pages that every worker maps."""
        return self.spec.gate_fd, self.spec.board_fd, self.control_fd, self.baton.fd
