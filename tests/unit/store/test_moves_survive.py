"""Moves, cancellations and deaths in any order: no job is lost, none is held twice or finished twice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.errors import JobError
from megatron.fill.status import Status
from megatron.fill.store.values import Claim, DeviceEntry, Progress, Standing
from megatron.fill.types import JobState
from megatron.fill.work import NewJob, Work
from tests.support.memory_store import MemoryStore

RANKS = range(3)
LEASE_S = 10.0
EVENTS = ("claim", "beat", "ask", "finish", "die", "cancel", "time")


@dataclass
class Cluster:
    """Ranks that hold at most one job each, as they believe."""

    now_s: float = 1000.0
    store: MemoryStore = field(init=False)
    held: dict[int, Claim] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = MemoryStore(lambda: self.now_s)
        self.store.submit([NewJob(name, Work("m:C")) for name in "ab"])

    def report(self, rank: int) -> None:
        busy_s = math.inf if rank in self.held else None
        self.store.report_device(DeviceEntry(f"rank {rank}", "run", busy_s), LEASE_S)

    def claim(self, rank: int, job: int) -> None:
        if rank in self.held:
            return
        claim = self.store.claim(f"agent {rank}", [job, 3 - job], LEASE_S, f"rank {rank}")
        if claim is not None:
            self.held[rank] = claim
        self.report(rank)

    def beat(self, rank: int, job: int) -> None:
        self.report(rank)
        if rank not in self.held:
            return
        standing = self.store.heartbeat(self.held[rank], Progress(self.now_s), LEASE_S)
        if standing is not Standing.HELD:
            claim = self.held.pop(rank)
            assert self.store.release(claim, Status(JobState.QUEUED, detail="stopped"), Progress(self.now_s), {}) is (
                standing is not Standing.LOST
            )

    def ask(self, rank: int, job: int) -> None:
        self.report(rank)
        self.store.ask_for(job, self.store.get(job).attempt, f"rank {rank}")

    def finish(self, rank: int, job: int) -> None:
        if rank in self.held:
            claim = self.held.pop(rank)
            if self.store.finish(claim, Status(JobState.SUCCEEDED), Progress(), {}):
                self.finished.append(claim.job.id)

    def die(self, rank: int, job: int) -> None:
        self.held.pop(rank, None)

    def cancel(self, rank: int, job: int) -> None:
        try:
            self.store.cancel(job)
        except JobError:
            assert self.store.get(job).state.finished

    def time(self, rank: int, job: int) -> None:
        self.now_s += 4.0

    def check(self) -> None:
        assert len(set(self.finished)) == len(self.finished)
        assert len(self.store.list()) == 2


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(RANKS), st.sampled_from([1, 2])), max_size=60))
def test_whatever_happens_every_job_can_still_be_run_to_its_one_end(events):
    cluster = Cluster()
    for name, rank, job in events:
        getattr(cluster, name)(rank, job)
        cluster.check()
    cluster.now_s += 1000  # all who were silent are given up, and nobody is waited for
    while (claim := cluster.store.claim("last", [1, 2], LEASE_S, "rank 9")) is not None:
        assert cluster.store.finish(claim, Status(JobState.SUCCEEDED), Progress(), {})
        cluster.finished.append(claim.job.id)
    assert len(set(cluster.finished)) == len(cluster.finished)
    for job in cluster.store.list():
        assert job.state is (JobState.SUCCEEDED if job.id in cluster.finished else JobState.CANCELLED)
