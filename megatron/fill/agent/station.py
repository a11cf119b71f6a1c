"""What a rank has for the jobs in its bubbles."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from megatron.fill.agent.claims import Claims
from megatron.fill.agent.memory import DeviceMemory
from megatron.fill.agent.ranking import Ranking
from megatron.fill.agent.spec import AgentSpec
from megatron.fill.device.port import WorkerDevice
from megatron.fill.pages.baton import Baton
from megatron.fill.pages.board import CycleBoardReader
from megatron.fill.pages.control import ControlPage
from megatron.fill.pages.gate import SharedGateReader


@dataclass(frozen=True, slots=True)
class Station:
    """Made before any thread of the agent starts, and shared by all of them.

    Gate, board, control and baton are words in shared memory, which any thread reads; of the baton, only the resident
    seat's thread says that it is dropped.  ``claims``, ``memory`` and ``ranking`` see to their own threads.

    Attributes:
        name: the device's, in the store.
        device: of this rank.
        memory: of that device.
        control_fd: of the control page, for workers: through it nothing can be written.
        orphaned: the rank has died.
    """

    spec: AgentSpec
    name: str
    gate: SharedGateReader
    board: CycleBoardReader
    control: ControlPage
    control_fd: int
    baton: Baton
    baton_fd: int
    device: WorkerDevice
    memory: DeviceMemory
    claims: Claims
    ranking: Ranking
    orphaned: threading.Event = field(default_factory=threading.Event)

    @property
    def run_dir(self) -> Path:
        return Path(self.spec.run_dir)

    @property
    def over(self) -> bool:
        """Whether the main job is over, or its rank has died."""
        return self.gate.ended or self.orphaned.is_set()

    @property
    def worker_fds(self) -> tuple[int, ...]:
        """What every worker maps."""
        return self.spec.gate_fd, self.spec.board_fd, self.control_fd, self.baton_fd
