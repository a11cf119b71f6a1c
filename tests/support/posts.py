"""A rank's agent without its rank: real pages, the real CPU as its device, and the store in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.fill.agent.agent import Seat
from megatron.fill.agent.claims import Claims
from megatron.fill.agent.context import AgentContext
from megatron.fill.agent.ledger import AttemptLedger
from megatron.fill.agent.memory import DeviceMemory
from megatron.fill.agent.ranking import Ranking
from megatron.fill.agent.spec import AgentSpec
from megatron.fill.agent.watch import Judge
from megatron.fill.agent.workers import WorkerPool
from megatron.fill.device.cpu import CpuDevice
from megatron.fill.device.port import Limits, WorkerDevice
from megatron.fill.linux.tree import OWN, children
from megatron.fill.pages.baton import Baton
from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.pages.control import ControlPage
from megatron.fill.pages.gate import SharedGate, SharedGateReader
from megatron.fill.pages.lastword import LastWord
from megatron.fill.records.agent import AgentFile
from megatron.fill.scheduler.policies import parse_policy
from megatron.fill.store.values import Claim, DeviceEntry, Job
from megatron.fill.work import NewJob, Work
from tests.support.memory_store import MemoryStore
from tests.support.pages import closed_pages

WORK = Work("m:C")


class Post:
    """A context, its pool and its ledger, and the rank's ends of the pages."""

    def __init__(self, folder: Path, device: WorkerDevice | None = None, **spec: Any) -> None:
        self.folder = folder
        self.gate, self.board, self.control = SharedGate(), CycleBoard(), ControlPage.create(3)
        self.store = MemoryStore()
        agent = self._spec(folder, **spec)
        device = device or CpuDevice()
        memory = DeviceMemory(device, agent.margin_bytes, 1.0)
        board = CycleBoardReader(agent.board_fd)
        self.context = AgentContext(
            spec=agent,
            name="rank 3",
            gate=SharedGateReader(agent.gate_fd),
            board=board,
            control=self.control,
            control_fd=self.control.reader_fd(),
            baton=Baton(Baton.create()),
            device=device,
            memory=memory,
            claims=Claims(
                "memory",
                "agent",
                None,
                lambda: DeviceEntry("rank 3", "run"),
                60.0,
                connect=lambda url, create: self.store,
            ),
            ranking=Ranking(parse_policy(agent.policy), "rank 3", "cpu", board, memory),
            ledger=AttemptLedger(AgentFile(folder, 3), LastWord.create()),
        )
        self.pool = WorkerPool(self.context)
        self.judge = Judge()
        self.ledger = self.context.ledger

    @staticmethod
    def _device() -> DeviceEntry:
        return DeviceEntry("rank 3", "run")

    def _spec(self, folder: Path, **spec: Any) -> AgentSpec:
        values: dict[str, Any] = {
            "run_dir": str(folder),
            "records": str(folder),
            "rank": 3,
            "ranks": 0,
            "parent": os.getpid(),
            "gate_fd": self.gate.reader_fd(),
            "board_fd": self.board.reader_fd(),
            "control_fd": self.control.fd,
            "left_fd": LastWord.create().fd,
            "device": "cpu",
            "device_uuid": None,
            "cpus": [],
            "store": str(folder / "jobs.db"),
            "submit": [],
            "policy": "priority",
            "lease_s": 60.0,
            "checkpoint_s": 300.0,
            "grace_ns": 10**10,
            "max_overruns": 3,
            "max_output_bytes": 1 << 20,
            "user": None,
            "namespaces": (),
            "binds": (),
            "network": True,
            "allow": [],
            "margin_bytes": 0,
            "limits": Limits(),
            "mps_pipe": None,
        }
        return AgentSpec(**values | spec)

    def submit(self, name: str = "pi", **work: Any) -> Job:
        [job] = self.store.submit([NewJob(name, replace(WORK, **work))])
        return job

    def claim(self, name: str = "pi", **spec: Any) -> Claim:
        claim = self.store.claim("agent", [self.submit(name, **spec).id], 60.0, "rank 3")
        assert claim is not None
        return claim

    def seat(self) -> Seat:
        return Seat(self.context, self.pool, self.judge)


@contextmanager
def post(folder: Path, **spec: Any) -> Iterator[Post]:
    """One whose store answers; what this process runs otherwise is not taken for its orphans."""
    with closed_pages():
        made = Post(folder, **spec)
        others = set(children(os.getpid())) - OWN
        OWN.update(others)
        try:
            yield made
        finally:
            made.pool.stand_down()
            made.gate.end()
            OWN.difference_update(others)
