"""Which job a seat should take next: the scheduler's view of one rank, filled from the store."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.fill.board import CycleBoardReader
from megatron.fill.errors import FillError, PlanError
from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.planner.search import best_plan
from megatron.fill.planner.tail import leftover, processing_time_s
from megatron.fill.profiles import BubbleCycle, JobProfile, profile_key
from megatron.fill.runtime.planned import CHUNK_RESERVE_NS, PLAN
from megatron.fill.scheduler.estimate import estimate_s
from megatron.fill.scheduler.policies import MOST_JOBS, parse_policy, rank_jobs
from megatron.fill.scheduler.state import DeviceState, JobView, SchedulerState
from megatron.fill.store.port import Device, Job, JobStore, Progress
from megatron.fill.types import JobState

_LOOK_AGAIN_S = 30.0  # how long an answer of the store about profiles is believed


@dataclass(frozen=True, slots=True)
class Resident:
    """The job in the resident seat, and its folder."""

    job: Job
    directory: Path


class Choice:
    """Ranks the jobs that wait for one device.

    Args:
        policy: as ``parse_policy`` reads it.
        device: this rank's device, by name.
        fingerprint: what a profile measured on it is good for.
        board: its bubble cycle.
    """

    def __init__(self, policy: str, device: str, fingerprint: str, board: CycleBoardReader) -> None:
        self.policy = parse_policy(policy)
        self._weighs_users = any(name == "fair" or ":" in name for _, name, _ in self.policy.terms)
        self.device = device
        self.fingerprint = fingerprint
        self.board = board
        self._unfit: dict[tuple[int, bool], int] = {}  # (job, as tail job) -> the board's version then
        self._told: dict[int, int] = {}  # job -> the board's version then
        self._profiles: dict[str, tuple[float, dict[str, Any] | None]] = {}

    def key(self, job: Job) -> str:
        return profile_key(job.spec, self.fingerprint)

    def unfit(self, job_id: int, tail: bool) -> None:
        """A worker found that this job fits no bubble here: do not try it again until the cycle is another one."""
        self._unfit[job_id, tail] = self.board.version

    @property
    def refused(self) -> tuple[int, ...]:
        """The jobs that were found not to fit the bubbles here, as long as the cycle is the same."""
        version = self.board.version
        # Copies: the seats' threads write them meanwhile.
        tried = {job_id for (job_id, tail), then in self._unfit.copy().items() if then == version and not tail}
        planned = {job_id for job_id, then in self._told.copy().items() if then == version}
        return tuple(sorted(tried | planned))

    def unit_s(self, store: JobStore, job: Job) -> float | None:
        """Seconds on the clock on the wall for a unit of the job's work here; infinity if it fits no bubble, None if
        nobody knows."""
        self._learn(store, job)
        if not self._may_fit(job, tail=False):
            return math.inf
        return estimate_s(self.board.read(), self._parsed(job), 1.0, CHUNK_RESERVE_NS)

    def remember(self, job: Job, content: dict[str, Any]) -> None:
        """This profile was just measured."""
        self._profiles[self.key(job)] = time.monotonic(), content

    def profile_of(self, job: Job) -> list[dict[str, Any]] | None:
        """The job's profiles as JSON, as far as the store told lately."""
        kept = self._kept(job)
        return None if kept is None else kept["configurations"]

    def wanted(self, store: JobStore, beside: Resident | None) -> list[int]:
        """The jobs that wait, best first: for the resident seat, or for the tail seat ``beside`` a resident job."""
        tail = beside is not None
        waiting = store.list({JobState.QUEUED})
        if tail:
            waiting = for_tails(waiting, store.devices())
        jobs = [job for job in waiting[: self.policy.most_jobs] if self._may_fit(job, tail)]
        if not jobs:
            return []
        for job in jobs:
            self._learn(store, job)
        cycle = self.board.read() if beside is None else self.leftover(beside) or self.board.read()
        if tail:
            room_bytes = min((slot.free_bytes for slot in cycle.slots), default=0) if cycle is not None else 0
            jobs = [job for job in jobs if self._memory_bytes(job) <= room_bytes]
        devices = {device.name: device for device in store.devices()}
        devices[self.device] = Device(self.device, "")  # this seat is free
        unit_s: dict[str, float | None] = {}
        views = tuple(self._view(job, cycle, unit_s) for job in jobs)
        if not tail and cycle is not None:
            for job, view in zip(jobs[:MOST_JOBS], views[:MOST_JOBS], strict=True):
                if view.processing_s[self.device] == math.inf:
                    self._say_why(store, job, cycle)
        state = SchedulerState(
            now_s=time.time(),
            devices=tuple(DeviceState(device.name, device.busy_until_s) for device in devices.values()),
            jobs=views,
            used_s=_used_s(store) if self._weighs_users else {},
        )
        return rank_jobs(self.policy, state, DeviceState(self.device))

    def leftover(self, resident: Resident) -> BubbleCycle | None:
        """The bubbles that the resident job leaves; None where it has no plan: then nobody knows."""
        cycle, planned = self.board.read(), _read_plan(resident.directory)
        if cycle is None or planned is None:
            return None
        for profile in self._parsed(resident.job):
            if profile.configuration == planned.configuration:
                try:
                    # The plan was made for the cycle of its time; today's differs a little.
                    return leftover(cycle, best_plan(cycle, [profile], CHUNK_RESERVE_NS), profile)
                except FillError:
                    return None
        return None

    def done_at_s(self, progress: Progress, directory: Path) -> float:
        """When the job that runs from this folder should be done; infinity if nobody knows."""
        planned = _read_plan(directory)
        cycle = self.board.read()
        if planned is None or cycle is None or progress.total_work is None:
            return math.inf
        left = max(0.0, progress.total_work - progress.work_done)
        return time.time() + processing_time_s(cycle, planned, left)

    def _may_fit(self, job: Job, tail: bool) -> bool:
        version = self._unfit.get((job.id, tail))
        return version is None or version != self.board.version

    def _learn(self, store: JobStore, job: Job) -> None:
        key, now_s = self.key(job), time.monotonic()
        asked_s, kept = self._profiles.get(key, (-math.inf, None))
        if kept is None and now_s - asked_s > _LOOK_AGAIN_S:
            self._profiles[key] = now_s, store.profile(key)

    def _kept(self, job: Job) -> dict[str, Any] | None:
        return self._profiles.get(self.key(job), (0.0, None))[1]

    def _parsed(self, job: Job) -> list[JobProfile]:
        try:
            return [JobProfile.from_dict(one) for one in self.profile_of(job) or ()]
        except ValueError:  # it will be measured again
            return []

    def _memory_bytes(self, job: Job) -> float:
        """What a tail job may take at most; infinity if nobody knows."""
        if job.spec["memory_bytes"] is not None:
            return job.spec["memory_bytes"]
        return min((profile.memory_bytes for profile in self._parsed(job)), default=math.inf)

    def _say_why(self, store: JobStore, job: Job, cycle: BubbleCycle) -> None:
        """Tell the user why this job waits, once for each cycle."""
        if self._told.get(job.id) == self.board.version:
            return
        self._told[job.id] = self.board.version
        try:
            best_plan(cycle, self._parsed(job), CHUNK_RESERVE_NS)
        except PlanError as error:
            store.note(job.id, f"does not fit {self.device}: {error}")

    def _view(self, job: Job, cycle: BubbleCycle | None, unit_s: dict[str, float | None]) -> JobView:
        """The job as policies see it; ``unit_s`` keeps the seconds per unit of work for the next job of its profile."""
        progress = job.progress
        total = progress.total_work or (self._kept(job) or {}).get("total_work")
        left = None if total is None else max(0.0, total - progress.work_done)
        key = self.key(job)
        if key not in unit_s:
            unit_s[key] = estimate_s(cycle, self._parsed(job), 1.0, CHUNK_RESERVE_NS)
        takes_s = unit_s[key]
        if takes_s is not None and takes_s != math.inf:
            takes_s = None if left is None else takes_s * left
        return JobView(
            id=job.id,
            name=job.name,
            user=job.user,
            priority=job.priority,
            submitted_s=job.submitted_s,
            deadline_s=job.deadline_s,
            remaining_work=left,
            processing_s={self.device: takes_s},
            attempt=job.attempt,
        )


def for_tails(waiting: Sequence[Job], devices: Sequence[Device]) -> list[Job]:
    """The jobs that no idle device would run whole: each idle one gets the first that it does not refuse."""
    idle = [device for device in devices if device.busy_until_s is None]
    left = []
    for job in waiting:
        taker = next((device for device in idle if job.id not in device.refuses), None)
        if taker is None:
            left.append(job)
        else:
            idle.remove(taker)
    return left


def _used_s(store: JobStore) -> dict[str, float]:
    used: dict[str, float] = {}
    for job in store.list(limit=10 * MOST_JOBS):
        used[job.user] = used.get(job.user, 0.0) + job.progress.harvested_s
    return used


def _read_plan(directory: Path) -> ExecutionPlan | None:
    try:
        return ExecutionPlan.from_dict(json.loads((directory / PLAN).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
