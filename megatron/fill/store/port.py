"""The job store's port: the interface that PipeFill needs to keep its jobs.

Times are seconds since the epoch (``_s``).  A *claim* makes one agent a job's only owner until its *lease* ends; every
heartbeat renews the lease.  A job whose lease has expired goes back to QUEUED with the next claim or ``recover`` of any
agent; its former owner is notified by its next call and has to stop.  An owner that calls before that still has the
job, so one that cannot reach the store goes on: perhaps nobody can.  ``attempt`` counts the claims of a job and
distinguishes its new owner from an old one, which can no longer finish it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from megatron.fill.status import JobState, Status
from megatron.fill.work import NewJob, Work


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a job, as last reported by the agent that holds it.

    Attributes:
        work_done: work done in ``unit``, over all attempts that count.
        total_work: total work; None if the task did not report it.
        unit: unit of the work.
        rate: recent work per second of wall-clock time; None if unknown.
        steps: number of steps done.
        harvested_s: time in bubbles spent in steps.
        checkpoint_s: time of the last save; None for never.
        resumable: True if the task reports that it can be saved and resumed elsewhere.
        startup_s: time that its current worker took until it could serve bubbles; None before that.
        failures: number of failures after which it was put back into the queue.
        joules: its part of the device's energy, by time; None where no device had a counter.
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
    joules: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A job in the store; further attributes as in ``NewJob``.

    Attributes:
        id: number of the job.
        status: its state, and what brought it there.
        submitted_s: time of submission.
        started_s: time of the last claim; None for never.
        finished_s: time at which it finished; None before.
        attempt: number of claims so far.
        owner: agent that holds it; None unless RUNNING.
        lease_until_s: end of the lease; None unless RUNNING.
        cancelling: True if its cancellation was requested while it ran.
        device: device that it runs on or last ran on, for people: ``rank 1 of runs/first on host``.
        directory: absolute path of its folder; empty before it was first placed.
        progress: progress as last reported.
        result: results that the task reported.
        asked_by: device that has asked for it since its last claim; empty for none.
        asked_s: time at which a device last asked for it; None for never.
    """

    id: int
    name: str
    work: Work
    user: str
    priority: int
    deadline_s: float | None
    status: Status
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

    @property
    def state(self) -> JobState:
        return self.status.state

    @property
    def reason(self) -> str:
        """The cause of its state, as text."""
        return self.status.text

    def lost(self, now_s: float) -> bool:
        """True if the job is RUNNING and its lease has expired at ``now_s`` (``JobStore.now_s``)."""
        return self.state is JobState.RUNNING and self.lease_until_s is not None and self.lease_until_s <= now_s


@dataclass(frozen=True, slots=True)
class Claim:
    """A proof that an agent holds a job."""

    job: Job
    owner: str

    @property
    def attempt(self) -> int:
        return self.job.attempt


class Standing(StrEnum):
    """The answer of a heartbeat to the agent."""

    HELD = "held"
    MOVE = "asked for"  # still held, but an idle device waits for the job: it should be stopped and released
    CANCELLED = "cancelled"  # still held, but the job should be stopped and finished as CANCELLED
    LOST = "lost"  # the lease has expired, and the job no longer belongs to this agent


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """A device of the store: a rank whose bubbles are open to jobs.

    Attributes:
        name: unique name, made of run and rank.
        run: run that the rank belongs to.
        busy_until_s: expected end of its job; None if it is idle, infinity if unknown.
        job: name of its job; empty for none.
        cycle: bubble cycle, as JSON of ``BubbleCycle``; None before it is measured.
        refuses: numbers of jobs that do not fit its current cycle.
    """

    name: str
    run: str
    busy_until_s: float | None = None
    job: str = ""
    cycle: dict[str, Any] | None = None
    refuses: tuple[int, ...] = ()


class JobStore(Protocol):
    """A durable queue of jobs, with their profiles and the devices that serve them.

    Every method raises StoreError if the database cannot be reached or stays locked, and may then be called again.
    """

    def now_s(self) -> float:
        """The current time, by the clock that leases use."""

    def submit(self, jobs: Sequence[NewJob]) -> list[Job]:
        """Put all jobs into the queue, or none.

        An unfinished job with the same name and spec is the same job, which continues; its entry is returned unchanged.

        Raises:
            JobError: an unfinished job with the same name has another spec, or a job is after one that is neither among
                the new jobs nor in the store.
        """

    def get(self, job_id: int) -> Job:
        """The job with that number.

        Raises:
            JobError: there is no such job.
        """

    def find(self, name: str) -> Job:
        """The latest job with that name or, if there is none, the job with that number (``"12"``).

        Raises:
            JobError: there is none; the message has the closest names.
        """

    def list(self, states: Collection[JobState] = (), limit: int | None = None) -> list[Job]:
        """The latest ``limit`` jobs in those states (by default all jobs), in the order of their submission."""

    def states(self, names: Collection[str]) -> dict[str, JobState]:
        """The state of the latest job with each of these names; unknown names are left out."""

    def stamp(self) -> tuple[int, int, int]:
        """The number of QUEUED jobs, the sum of their numbers, and the number of SUCCEEDED jobs.

        It is cheap, however many jobs there are.  While it is unchanged, the same jobs wait and the same jobs can
        start.
        """

    def used_s(self, since_s: float) -> dict[str, float]:
        """The seconds in bubbles that the jobs of each user have had, of those that finished since then or have not."""

    def claim(
        self, owner: str, wanted: Iterable[int], lease_s: float, device: str = "", most: int | None = None
    ) -> Claim | None:
        """Claim the first job of ``wanted`` (numbers, best first) that is still QUEUED; None if there is none.

        Jobs whose lease has expired are put back to QUEUED first (``recover``).  A job is skipped if another call
        works on it at this moment, if another device has asked for it (``ask_for``) and is still idle, or if ``most``
        jobs of its user run.
        """

    def ask_for(self, job_id: int, attempt: int, device: str) -> bool:
        """Ask the holder of a RUNNING job to give it to ``device``, which is idle; False if the request is refused.

        The next heartbeat notifies the holder (MOVE).  Once it has released the job, only ``device`` can claim it.  The
        request is valid for ``ASK_S`` and while ``device`` is idle: if its agent dies or takes another job, the job
        stays where it is, or is free for any device.  The request is refused if the job was asked for less than
        ``ASK_AGAIN_S`` ago, is ``cancelling``, or was claimed again since ``attempt``.
        """

    def heartbeat(self, claim: Claim, progress: Progress, lease_s: float) -> Standing:
        """Renew the lease for ``lease_s``, and report the job's progress."""

    def place(self, claim: Claim, directory: str) -> bool:
        """Record the job's folder; False if the claim is lost."""

    def finish(self, claim: Claim, status: Status, progress: Progress, result: dict[str, Any]) -> bool:
        """Finish the job as SUCCEEDED, FAILED or CANCELLED; False (and nothing changes) if the claim is lost.

        After a StoreError it may have succeeded anyway: the same call then returns True.
        """

    def release(self, claim: Claim, status: Status, progress: Progress, result: dict[str, Any]) -> bool:
        """Put the job back to QUEUED (or CANCELLED if that was requested); False if the claim is lost.

        After that, the job's status is ``status`` with the state QUEUED.
        """

    def disown(self, owner: str) -> int:
        """Release all jobs of ``owner``, which is known to be dead; return their number."""

    def recover(self) -> int:
        """Put jobs whose lease has expired back to QUEUED (or CANCELLED if that was requested); return their number."""

    def cancel(self, job_id: int) -> Job:
        """Cancel a job: a QUEUED job at once; a RUNNING job is ``cancelling`` until its agent stops it.

        A RUNNING job whose lease has expired is also cancelled at once.

        Raises:
            JobError: there is no such job, or it has finished.
        """

    def note(self, job_id: int, status: Status) -> None:
        """Record why a QUEUED job still waits, as its status; a job in another state is not changed."""

    def retry(self, job_id: int) -> Job:
        """Put a FAILED or CANCELLED job back to QUEUED, with its checkpoint if there is one.

        A RUNNING job whose lease has expired is put back too.

        Raises:
            JobError: there is no such job, it has not finished or has succeeded, or its name is in use again.
        """

    def forget(self, job_ids: Collection[int], before_s: float) -> Sequence[int]:
        """Delete those of these jobs that finished before ``before_s`` and are not needed; return their numbers.

        A job is needed if a job that stays is ``after`` it, and if it is the store's newest (``aging.forgettable``).
        """

    def report_device(self, device: DeviceEntry, lease_s: float) -> None:
        """Record that a device serves jobs; it is dropped unless reported again within ``lease_s``."""

    def forget_device(self, name: str) -> None:
        """Drop a device, which serves no more jobs."""

    def devices(self) -> Sequence[DeviceEntry]:
        """The devices that serve jobs now, by name."""

    def profile(self, key: str) -> dict[str, Any] | None:
        """The profile kept under ``key``; None if there is none."""

    def keep_profile(self, key: str, profile: dict[str, Any]) -> None:
        """Keep a profile, replacing an earlier one with that key."""

    def close(self) -> None:
        """Release the store's resources."""
