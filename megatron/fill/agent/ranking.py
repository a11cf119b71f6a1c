"""Choice of a seat's next job: fills the scheduler's state from the store, and ranks the jobs for one rank."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.fill import untrusted
from megatron.fill.agent.memory import DeviceMemory
from megatron.fill.display import counted
from megatron.fill.errors import FillError, PlanError
from megatron.fill.folders import PLAN
from megatron.fill.pages.board import CycleBoardReader
from megatron.fill.planner.held import RESERVE_NS, held_cycle, leftover, processing_time_s, room_bytes
from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.planner.search import best_plan, plan_job, unit_s
from megatron.fill.profiles import BubbleCycle, JobProfile, MeasuredJob, cycle_from_dict
from megatron.fill.scheduler.policies import MOST_JOBS, Policy, rank_jobs
from megatron.fill.scheduler.state import DeviceState, JobView, SchedulerState
from megatron.fill.status import Cause, JobState, Status
from megatron.fill.store.queue import JobStore
from megatron.fill.store.values import DeviceEntry, Job, Progress
from megatron.fill.types import Quota

logger = logging.getLogger("pipefill.agent")

_LOOK_AGAIN_S = 30.0  # time after which the store is asked again for a missing profile
_HOUR_S, _DAY_S = 3600.0, 86400.0
_MOST_TOLD = 500  # waiting jobs, the first submitted, in which the store has why they wait


@dataclass(frozen=True, slots=True)
class Resident:
    """The job in the resident seat, and its folder."""

    job: Job
    directory: Path


@dataclass(eq=False, repr=False)
class Ranking:
    """Ranks the jobs that wait for one device; for any thread, since all state is kept by job or by profile."""

    policy: Policy
    device: str  # name of this rank's device
    fingerprint: str  # device and software for which profiles measured here are valid
    board: CycleBoardReader  # the page with its bubble cycle
    memory: DeviceMemory  # the device's memory
    quota: Quota | None = None  # most that the jobs of each user may take; None for all

    def __post_init__(self) -> None:
        self.misfits = Misfits(self.device, self.board)  # the jobs that were found not to fit the bubbles here
        self._explained = 0  # the board's version at the latest messages to users of waiting jobs
        self._profiles: dict[str, tuple[float, MeasuredJob | None]] = {}

    def key(self, job: Job) -> str:
        return job.work.profile_key(self.fingerprint)

    def unit_s(self, store: JobStore, job: Job) -> float | None:
        """Return wall-clock seconds per unit of the job's work here; infinity if it fits no bubble, None if unknown."""
        self._learn(store, job)
        return self._unit_s(job, self._cycle()) if self.misfits.may_fit(job.id, tail=False) else math.inf

    def _unit_s(self, job: Job, cycle: BubbleCycle | None) -> float | None:
        return unit_s(None if cycle is None else _for_job(cycle, job), self.profiles_of(job) or (), RESERVE_NS)

    def remember(self, job: Job, measured: MeasuredJob) -> None:
        self._profiles[self.key(job)] = time.monotonic(), measured

    def profiles_of(self, job: Job) -> tuple[JobProfile, ...] | None:
        """Return the job's profiles, None if they are not known; the store is not asked."""
        kept = self._kept(job)
        return None if kept is None else kept.profiles

    def wanted(self, store: JobStore, neighbour: Resident | None) -> list[int]:
        """Return the ids of waiting jobs, best first, for the resident seat or the tail seat next to ``neighbour``."""
        tail = neighbour is not None
        waiting = may_begin(store, store.list({JobState.QUEUED}))
        if self.quota is not None:
            waiting = within_quota(store, waiting, self.quota)
        if tail:
            waiting = for_tails(waiting, store.devices())
        jobs = [job for job in waiting[: self.policy.most_jobs] if self.misfits.may_fit(job.id, tail)]
        if not jobs:
            return []
        for job in jobs:
            self._learn(store, job)
        cycle = self._cycle() if neighbour is None else self.leftover(neighbour) or self._cycle()
        if tail:
            room_bytes = min((slot.free_bytes for slot in cycle.slots), default=0) if cycle is not None else 0
            jobs = [job for job in jobs if self._memory_bytes(job) <= room_bytes]
        devices = {device.name: device for device in store.devices()}
        devices[self.device] = DeviceEntry(self.device, "")  # this seat is free
        cycles = self._other_cycles(devices.values()) | {self.device: cycle}
        known_s: dict[tuple[str, str], float | None] = {}
        views = tuple(self._view(job, cycles, known_s) for job in jobs)
        if not tail and cycle is not None:
            for job, view in zip(jobs[:MOST_JOBS], views[:MOST_JOBS], strict=True):
                if view.processing_s[self.device] == math.inf:
                    self._say_why(store, job, cycle)
        state = SchedulerState(
            now_s=time.time(),
            devices=tuple(DeviceState(device.name, device.busy_until_s) for device in devices.values()),
            jobs=views,
            used_s=store.used_s(0.0) if self.policy.weighs_users else {},
        )
        return rank_jobs(self.policy, state, DeviceState(self.device))

    def leftover(self, resident: Resident) -> BubbleCycle | None:
        """Return the bubble time that the resident job leaves; None if unknown, since it has no plan."""
        cycle, planned = self._cycle(), _read_plan(resident.directory)
        if cycle is None or planned is None:
            return None
        for profile in self.profiles_of(resident.job) or ():
            if profile.configuration == planned.configuration:
                # The room is without what the job holds already, which leftover() subtracts.
                held_bytes = min(self.memory.taken_bytes, profile.memory_bytes)
                cycle = held_cycle(cycle, room_bytes(cycle, 0) + held_bytes)
                with contextlib.suppress(FillError):
                    # The plan was made for the cycle of that time, from which the present one differs a little.
                    return leftover(cycle, best_plan(cycle, [profile], RESERVE_NS), profile)
        return None

    def done_at_s(self, progress: Progress, directory: Path) -> float:
        """Return the expected end of the job in this folder, in seconds since the epoch; infinity if unknown."""
        planned, cycle = _read_plan(directory), self.board.read()
        if planned is None or cycle is None or progress.total_work is None:
            return math.inf
        left = max(0.0, progress.total_work - progress.work_done)
        return time.time() + processing_time_s(cycle, planned, left)

    def _cycle(self) -> BubbleCycle | None:
        """Return this rank's cycle, with the memory cap of a worker."""
        cycle = self.board.read()
        return None if cycle is None else held_cycle(cycle, self.memory.room_bytes(cycle))

    def _other_cycles(self, devices: Iterable[DeviceEntry]) -> dict[str, BubbleCycle | None]:
        """Return the cycle of each other device that has published one.

        The memory of that device's present job is missing in it, but a job may hold at least as much there as here.
        """
        found: dict[str, BubbleCycle | None] = {}
        here = self._cycle()
        least_bytes = 0 if here is None else room_bytes(here, 0)
        for device in devices:
            if device.name == self.device or device.cycle is None:
                continue
            with contextlib.suppress(ValueError):  # the other agent has another version
                cycle = cycle_from_dict(device.cycle)
                found[device.name] = held_cycle(cycle, max(least_bytes, room_bytes(cycle, self.memory.kept_bytes)))
        return found

    def _learn(self, store: JobStore, job: Job) -> None:
        key, now_s = self.key(job), time.monotonic()
        asked_s, kept = self._profiles.get(key, (-math.inf, None))
        if kept is None and now_s - asked_s > _LOOK_AGAIN_S:
            self._profiles[key] = now_s, _read_profile(store, key)

    def _kept(self, job: Job) -> MeasuredJob | None:
        return self._profiles.get(self.key(job), (0.0, None))[1]

    def _memory_bytes(self, job: Job) -> float:
        """Return the memory that a tail job needs at least; infinity if unknown."""
        if job.work.memory_bytes is not None:
            return job.work.memory_bytes
        return min((profile.memory_bytes for profile in self.profiles_of(job) or ()), default=math.inf)

    def explain(self, store: JobStore) -> None:
        """Store the messages for waiting jobs that do not fit, once per cycle; a busy seat does not do this itself."""
        version, cycle = self.board.version, self._cycle()
        if cycle is None or version == self._explained:
            return
        self._explained = version
        for job in may_begin(store, store.list({JobState.QUEUED}))[:MOST_JOBS]:
            if not all(self.misfits.may_fit(job.id, tail) for tail in (False, True)):
                continue  # its worker's finding holds
            if self.unit_s(store, job) == math.inf:
                self._say_why(store, job, cycle)
            else:
                self.misfits.withdraw(store, job)

    def _say_why(self, store: JobStore, job: Job, cycle: BubbleCycle) -> None:
        """Store the message why this job has no plan here, once per cycle."""
        if not self.misfits.planned(job.id):
            return
        try:
            plan_job(cycle, self.profiles_of(job) or (), job.work.memory_bytes)
        except PlanError as error:
            self.misfits.note(store, job, str(error))

    def _view(
        self, job: Job, cycles: Mapping[str, BubbleCycle | None], known_s: dict[tuple[str, str], float | None]
    ) -> JobView:
        """Return the view of the job for policies; ``known_s`` caches the seconds per unit, by profile and device."""
        kept, profile = self._kept(job), self.key(job)
        total = job.progress.total_work or (None if kept is None else kept.total_work)
        left = None if total is None else max(0.0, total - job.progress.work_done)
        processing_s: dict[str, float | None] = {}
        for device, cycle in cycles.items():
            if (profile, device) not in known_s:
                known_s[profile, device] = self._unit_s(job, cycle)
            takes_s = known_s[profile, device]
            if takes_s is not None and takes_s != math.inf:
                takes_s = None if left is None else takes_s * left
            processing_s[device] = takes_s
        return JobView(
            id=job.id,
            name=job.name,
            user=job.user,
            priority=job.priority,
            submitted_s=job.submitted_s,
            deadline_s=job.deadline_s,
            remaining_work=left,
            processing_s=processing_s,
            attempt=job.attempt,
        )


def _for_job(cycle: BubbleCycle, job: Job) -> BubbleCycle:
    """Return the cycle with the memory of a worker of this job: at most what it asked for."""
    return held_cycle(cycle, room_bytes(cycle, 0), job.work.memory_bytes)


def _read_profile(store: JobStore, key: str) -> MeasuredJob | None:
    content = store.profile(key)
    try:
        return None if content is None else MeasuredJob.from_dict(content)
    except ValueError as error:
        logger.warning("a profile in the store makes no sense, its job is measured again: %s", error)
        return None


def _read_plan(directory: Path) -> ExecutionPlan | None:
    try:
        return ExecutionPlan.from_dict(untrusted.read_json(directory / PLAN))
    except (OSError, ValueError):
        return None


def may_begin(store: JobStore, waiting: Sequence[Job]) -> Sequence[Job]:
    """Return the waiting jobs without those whose prerequisites (``after``) have not all succeeded."""
    firsts = {first for job in waiting for first in job.work.after}
    if not firsts:
        return waiting
    done = {name for name, state in store.states(firsts).items() if state is JobState.SUCCEEDED}
    return [job for job in waiting if done.issuperset(job.work.after)]


def within_quota(store: JobStore, waiting: Sequence[Job], quota: Quota) -> list[Job]:
    """Return the waiting jobs of users who have not used up their quota; the others have it as their cause.

    Two agents that ask at once may both find room for a job: ``JobStore.claim`` keeps the number of jobs.
    """
    reasons = _quota_reasons(store, quota)
    for job in waiting[:_MOST_TOLD]:
        reason = reasons.get(job.user, "")
        if reason and (job.status.cause, job.status.detail) != (Cause.QUOTA, reason):
            store.note(job.id, Status(JobState.QUEUED, Cause.QUOTA, reason))
        elif not reason and job.status.cause is Cause.QUOTA:
            store.note(job.id, Status(JobState.QUEUED))
    return [job for job in waiting if job.user not in reasons]


def _quota_reasons(store: JobStore, quota: Quota) -> dict[str, str]:
    """Return why each user who has used up the quota has."""
    reasons: dict[str, str] = {}
    if quota.device_hours is not None:
        used_s = store.used_s(store.now_s() - quota.days * _DAY_S)
        most_s = quota.device_hours * _HOUR_S
        reasons |= {user: f"has had {quota.hours}" for user, its_s in used_s.items() if its_s >= most_s}
    if quota.jobs is not None:
        running = Counter(job.user for job in store.list({JobState.RUNNING}))
        reason = f"runs {counted(quota.jobs, 'job')}"
        reasons |= {user: reason for user, count in running.items() if count >= quota.jobs}
    return reasons


def for_tails(waiting: Sequence[Job], devices: Sequence[DeviceEntry]) -> list[Job]:
    """Return the jobs that are left when each idle device gets the first job that it does not refuse."""
    idle = [device for device in devices if device.busy_until_s is None]
    left = []
    for job in waiting:
        taker = next((device for device in idle if job.id not in device.refuses), None)
        if taker is None:
            left.append(job)
        else:
            idle.remove(taker)
    return left


class Misfits:
    """Remembers which jobs do not fit, until the board shows another cycle; for any thread."""

    def __init__(self, device: str, board: CycleBoardReader) -> None:
        self._device, self._board = device, board
        self._tried: dict[tuple[int, bool], int] = {}  # (job, as tail job) -> the board's version then
        self._planned: dict[int, int] = {}  # job -> the board's version then

    def tried(self, job_id: int, tail: bool) -> None:
        """Remember that a worker found no bubble for this job."""
        self._tried[job_id, tail] = self._board.version

    def may_fit(self, job_id: int, tail: bool) -> bool:
        """True unless a worker has found that the job does not fit."""
        return self._tried.get((job_id, tail)) != self._board.version

    @property
    def refused(self) -> tuple[int, ...]:
        """The jobs that are known not to fit."""
        version = self._board.version
        # Copies, since other threads may write at the same time.
        tried = {job_id for (job_id, tail), then in self._tried.copy().items() if then == version and not tail}
        planned = {job_id for job_id, then in self._planned.copy().items() if then == version}
        return tuple(sorted(tried | planned))

    def planned(self, job_id: int) -> bool:
        """Remember that the job has no plan here; True if that was not known for this cycle."""
        then, self._planned[job_id] = self._planned.get(job_id), self._board.version
        return then != self._planned[job_id]

    def note(self, store: JobStore, job: Job, detail: str) -> None:
        """Store for the job's user that it does not fit here."""
        store.note(job.id, Status(JobState.QUEUED, Cause.DOES_NOT_FIT, detail, device=self._device))

    def withdraw(self, store: JobStore, job: Job) -> None:
        """Clear the job's note of an earlier cycle: the job now has a plan here, or it is not known yet."""
        if job.status.cause is Cause.DOES_NOT_FIT and job.status.device == self._device:
            store.note(job.id, Status(JobState.QUEUED))
