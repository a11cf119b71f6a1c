"""The job store's port: what PipeFill asks of whatever keeps its jobs.

Times are seconds since the epoch (``_s``).  A *claim* makes one agent a job's only owner until its *lease* ends; every
heartbeat renews the lease.  A job whose lease has run out goes back to QUEUED with the next claim or ``recover`` of
anyone; its former owner learns so from its next call and has to stop.  (An owner that comes before that still has the
job.  One that cannot reach the store has to stop by itself when its lease ends.)  ``attempt`` counts the claims of a
job and tells an old owner from a new one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from megatron.fill.types import JobState
from megatron.fill.work import Work


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job as it is submitted.

    Attributes:
        name: unique among the unfinished jobs of a store.
        user: whom fair sharing counts it for.
        deadline_s: when it should be done; None for whenever.
    """

    name: str
    work: Work
    user: str = ""
    priority: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is, as the agent that holds it last said.

    Attributes:
        work_done: in ``unit``, over all attempts that count.
        total_work: how much there is in all; None if the task did not say.
        rate: work per second of the clock on the wall, lately; None if unknown.
        checkpoint_s: when its state was last saved; None for never.
        resumable: it says that it can be saved and go on elsewhere.
        startup_s: how long its present worker took until it could serve bubbles; None until it does.
        failures: how often it has failed and was put back into the queue.
    """

    work_done: float = 0.0
    total_work: float | None = None
    unit: str = "steps"
    rate: float | None = None
    steps: int = 0
    harvested_s: float = 0.0
    checkpoint_s: float | None = None
    resumable: bool = False
    startup_s: float | None = None
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the store has it.

    Attributes:
        started_s: when it was last claimed.
        owner: the agent that holds it; None unless RUNNING.
        device: where it runs or last ran, for a reader: ``rank 1 of runs/first on host``.
        directory: its folder, absolute; empty until it was first claimed.
        cancelling: someone asked for its cancellation while it ran.
        reason: why it is in its state.
        result: what the task reported.
        asked_by: the device that asked for it since it was last claimed; empty for none.
        asked_s: when one last did; None for never.
    """

    id: int
    name: str
    work: Work
    user: str
    priority: int
    deadline_s: float | None
    state: JobState
    reason: str
    submitted_s: float
    started_s: float | None
    finished_s: float | None
    attempt: int
    owner: str | None
    lease_until_s: float | None
    cancelling: bool
    device: str
    directory: str
    progress: Progress
    result: dict[str, Any] = field(default_factory=dict)
    asked_by: str = ""
    asked_s: float | None = None

    def lost(self, now_s: float) -> bool:
        """Whether its agent is not heard of any more: it is RUNNING, and the lease is over (``JobStore.now_s``)."""
        return self.state is JobState.RUNNING and self.lease_until_s is not None and self.lease_until_s <= now_s


@dataclass(frozen=True, slots=True)
class Claim:
    """Proof that one agent holds a job."""

    job: Job
    owner: str

    @property
    def attempt(self) -> int:
        return self.job.attempt


class Standing(StrEnum):
    """What a heartbeat tells the agent."""

    HELD = "held"
    MOVE = "asked for"  # still held, but an idle device waits for it: it should be stopped and released
    CANCELLED = "cancelled"  # still held, but the job should be stopped and finished as CANCELLED
    LOST = "lost"  # the lease ran out, and the job is no longer this agent's


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """A rank whose bubbles are open to jobs.

    Attributes:
        name: unique: the run and the rank.
        busy_until_s: when its job is expected to be done; None when it is idle, infinity when nobody knows.
        cycle: its bubble cycle as ``BubbleCycle`` has it in JSON; None before it is measured.
        refuses: the numbers of jobs that it has found not to fit its present cycle.
    """

    name: str
    run: str
    busy_until_s: float | None = None
    job: str = ""
    cycle: dict[str, Any] | None = None
    refuses: tuple[int, ...] = ()


class JobStore(Protocol):
    """A durable queue of jobs, their profiles and the devices that serve them.

    Every method raises StoreError when the database cannot be reached or stays locked, and may then be called again.
    """

    def now_s(self) -> float:
        """The time that leases are measured by."""

    def submit(self, jobs: Sequence[NewJob]) -> list[Job]:
        """Put all jobs into the queue, or none.

        An unfinished job of the same name and spec is the same job, which goes on; its entry is returned as it is.

        Raises:
            JobError: an unfinished job of the same name has another spec, or one is after a job that is neither
                among them nor in the store.
        """

    def get(self, job_id: int) -> Job:
        """Raises JobError when there is no such job."""

    def find(self, name: str) -> Job:
        """The latest job of that name or, where there is none, the job of that number (``"12"``).

        Raises:
            JobError: there is none; the message names the closest names there are.
        """

    def list(self, states: Collection[JobState] = (), limit: int | None = None) -> list[Job]:
        """The jobs in those states (none: all), in the order of their submission; the latest ``limit`` of them."""

    def states(self, names: Collection[str]) -> dict[str, JobState]:
        """The state of the latest job of each of these names; without those that there are not."""

    def stamp(self) -> tuple[int, int, int]:
        """What is cheap to ask for, however many jobs there are: how many are QUEUED, the sum of their numbers, and how
        many have SUCCEEDED.  While it stays the same, it is the same jobs that wait, and that could begin."""

    def claim(self, owner: str, wanted: Iterable[int], lease_s: float, device: str = "") -> Claim | None:
        """Take the first job of ``wanted`` (numbers, best first) that is still QUEUED; None if none is.

        Jobs whose lease ran out are put back to QUEUED first (``recover``).  A job that another call is at work on at
        this moment is passed over, and so is one that another device has asked for (``ask_for``), while that is idle.
        """

    def ask_for(self, job_id: int, attempt: int, device: str) -> bool:
        """Ask the holder of a RUNNING job to give it to ``device``, which is idle; False if that is not to be.

        The next heartbeat tells the holder (MOVE).  Once it has released the job, only ``device`` can claim it.  All
        this holds for ``ASK_S`` and while ``device`` is idle: if its agent dies or takes another job, the job stays
        where it is, or is anybody's.  A job that was asked for less than ``ASK_AGAIN_S`` ago is not asked for again,
        nor is one that is ``cancelling``, or that was claimed anew since ``attempt``.
        """

    def heartbeat(self, claim: Claim, progress: Progress, lease_s: float) -> Standing:
        """Keep the job for another ``lease_s``, and say how far it is."""

    def place(self, claim: Claim, directory: str) -> bool:
        """Note the job's folder; False if the claim is lost."""

    def finish(self, claim: Claim, state: JobState, reason: str, progress: Progress, result: dict[str, Any]) -> bool:
        """The job is done: SUCCEEDED, FAILED or CANCELLED; False (and nothing changes) if the claim is lost.

        After a StoreError it may have happened all the same: then the same call again returns True.
        """

    def release(self, claim: Claim, reason: str, progress: Progress, result: dict[str, Any]) -> bool:
        """Give the job back: QUEUED again (CANCELLED if that was asked for); False if the claim is lost."""

    def disown(self, owner: str, reason: str) -> int:
        """Give back all that ``owner`` holds, as ``release`` does, for it is known to be dead; how many there were."""

    def recover(self) -> int:
        """Put the jobs whose lease ran out back to QUEUED (CANCELLED where that was asked for); how many there were."""

    def cancel(self, job_id: int) -> Job:
        """A QUEUED job is CANCELLED at once, a RUNNING one is ``cancelling`` until its agent stops it.

        One whose lease ran out is put back to QUEUED before (``recover``), and so CANCELLED at once.

        Raises:
            JobError: there is no such job, or it has finished.
        """

    def note(self, job_id: int, reason: str) -> None:
        """Say why a QUEUED job still waits; of a job that is not QUEUED any more, nothing changes."""

    def retry(self, job_id: int) -> Job:
        """Put a FAILED or CANCELLED job back to QUEUED, with its checkpoint if it left one.

        So is a RUNNING one whose lease ran out.

        Raises:
            JobError: there is no such job, it has not finished or has succeeded, or its name is in use again.
        """

    def report_device(self, device: DeviceEntry, lease_s: float) -> None:
        """This device serves jobs, and will say so again within ``lease_s``."""

    def forget_device(self, name: str) -> None:
        """This device serves no more jobs."""

    def devices(self) -> Sequence[DeviceEntry]:
        """The devices that serve jobs now, by name."""

    def profile(self, key: str) -> dict[str, Any] | None:
        """What was kept under ``key``; None if nothing was."""

    def keep_profile(self, key: str, profile: dict[str, Any]) -> None:
        """Keep a profile, in place of an earlier one with that key."""

    def close(self) -> None:
        """Release what the store holds open."""
