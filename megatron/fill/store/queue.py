"""The durable queue of jobs, independent of the database: each method is one ``Transaction``.

Times are seconds since the epoch (``_s``).  A *claim* makes one agent a job's only owner until its *lease* ends; every
heartbeat renews the lease.  A job whose lease has expired goes back to QUEUED with the next claim or ``recover`` of any
agent; its former owner is notified by its next call and has to stop.  An owner that calls before that still has the
job, so one that cannot reach the store goes on: perhaps nobody can.  ``attempt`` counts the claims of a job and
distinguishes its new owner from an old one, which can no longer finish it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate

from megatron.fill.errors import JobError
from megatron.fill.status import Cause, JobState, Status
from megatron.fill.store import checks, rules
from megatron.fill.store.transaction import Transaction
from megatron.fill.store.values import Claim, DeviceEntry, Job, Progress, Standing
from megatron.fill.work import NewJob

_CANCELLED = Status(JobState.CANCELLED, Cause.CANCELLED)
ASK_AGAIN_S = 300.0  # shortest time between two requests to move a job, each of which interrupts it


def _in_transaction[**P, T](
    method: Callable[Concatenate[JobStore, Transaction, P], T],
) -> Callable[Concatenate[JobStore, P], T]:
    """Give a method its one transaction, and repeat it if the database temporarily fails."""

    @wraps(method)
    def run(store: JobStore, *args: P.args, **named: P.kwargs) -> T:
        return store._run(lambda transaction: method(store, transaction, *args, **named))

    return run


class JobStore(ABC):
    """A durable queue of jobs, with their profiles and the devices that serve them.

    Every method raises StoreError if the database cannot be reached or stays locked, and may then be called again.
    """

    @abstractmethod
    def _run[T](self, work: Callable[[Transaction], T], *, write: bool = True) -> T:
        """Do ``work`` in one transaction, and repeat it if the database temporarily fails."""

    @abstractmethod
    def close(self) -> None:
        """Release the store's resources."""

    def now_s(self) -> float:
        """The current time, by the clock that leases use."""
        return self._run(lambda transaction: transaction.now_s, write=False)

    def submit(self, jobs: Sequence[NewJob]) -> list[Job]:
        """Put all jobs into the queue, or none.

        An unfinished job with the same name and spec is the same job, which continues; its entry is returned unchanged.

        Raises:
            JobError: an unfinished job of that name has another spec, or a job is after one that does not exist.
        """
        checked = [checks.checked(job) for job in jobs]  # others can use the store meanwhile
        return self._run(lambda transaction: rules.add(transaction, checked))

    def get(self, job_id: int) -> Job:
        """The job with that number; JobError if there is no such job."""
        return self._run(lambda transaction: rules.existing(transaction, job_id), write=False)

    def find(self, name: str) -> Job:
        """The latest job of that name, else of that number (``"12"``); JobError, with the closest names, if none."""
        return self._run(lambda transaction: rules.find(transaction, name), write=False)

    def list(self, states: Collection[JobState] = (), limit: int | None = None) -> list[Job]:
        """The latest ``limit`` jobs in those states (by default all jobs), in the order of their submission."""
        return self._run(lambda transaction: transaction.jobs(states, limit), write=False)

    def states(self, names: Collection[str]) -> dict[str, JobState]:
        """The state of the latest job with each of these names; unknown names are left out."""
        return self._run(lambda transaction: transaction.states(set(names)), write=False)

    def stamp(self) -> tuple[int, int, int]:
        """The number of QUEUED jobs, the sum of their numbers, and the number of SUCCEEDED jobs.

        It is cheap, however many jobs there are.  While it is unchanged, the same jobs wait and can start.
        """
        return self._run(lambda transaction: transaction.stamp(), write=False)

    def used_s(self, since_s: float) -> dict[str, float]:
        """The device-seconds that the jobs of each user have had, of those that finished since then or have not."""
        return self._run(lambda transaction: transaction.used_s(since_s), write=False)

    @_in_transaction
    def claim(
        self,
        transaction: Transaction,
        owner: str,
        wanted: Collection[int],
        lease_s: float,
        device: str = "",
        most: int | None = None,
    ) -> Claim | None:
        """Claim the first job of ``wanted`` (numbers, best first) that is still QUEUED; None if there is none.

        Jobs whose lease has expired are put back to QUEUED first (``recover``).  A job is skipped if another call
        works on it at this moment, if another device has asked for it (``ask_for``) and is still idle, or if ``most``
        jobs of its user run.
        """
        checks.check_lease(lease_s)
        ids = list(dict.fromkeys(job_id for job_id in wanted if checks.possible(job_id)))
        full: set[str] = set()
        if most is not None:
            transaction.lock_names()  # two claims at once would both find room
        _recover(transaction)
        if most is not None:
            running = Counter(job.user for job in transaction.jobs({JobState.RUNNING}, None))
            full = {user for user, count in running.items() if count >= most}
        job = rules.first_free(transaction, ids, device, full)
        if job is None:
            return None
        now_s = transaction.now_s
        job = replace(job, status=Status(JobState.RUNNING), started_s=now_s, attempt=job.attempt + 1, asked_by="")
        job = replace(job, owner=owner, lease_until_s=now_s + lease_s, device=checks.storable(device))
        transaction.put(job)
        return Claim(job, owner)

    @_in_transaction
    def ask_for(self, transaction: Transaction, job_id: int, attempt: int, device: str) -> bool:
        """Ask the agent of a RUNNING job to give it to ``device``, which is idle; False if the request is refused.

        The next heartbeat notifies that agent (MOVE).  Once it has released the job, only ``device`` can claim it.  The
        request is valid for ``ASK_S`` and while ``device`` is idle: if its agent dies or takes another job, the job
        stays where it is, or is free for any device.  The request is refused if the job was asked for less than
        ``ASK_AGAIN_S`` ago, is ``cancelling``, or was claimed again since ``attempt``.
        """
        device = checks.storable(device)
        job = transaction.job(job_id) if checks.possible(job_id) else None
        now_s = transaction.now_s
        if job is None or (job.state, job.attempt, job.cancelling) != (JobState.RUNNING, attempt, False):
            return False
        lately = job.asked_s is not None and now_s < job.asked_s + ASK_AGAIN_S
        if lately or job.device == device or not rules.idle(transaction, device):
            return False
        transaction.put(replace(job, asked_by=device, asked_s=now_s))
        return True

    @_in_transaction
    def heartbeat(self, transaction: Transaction, claim: Claim, progress: Progress, lease_s: float) -> Standing:
        """Renew the lease for ``lease_s``, and report the job's progress."""
        checks.check_lease(lease_s)
        job = rules.held(transaction, claim)
        if job is None:
            return Standing.LOST
        transaction.put(replace(job, lease_until_s=transaction.now_s + lease_s, progress=progress))
        if job.cancelling:
            return Standing.CANCELLED
        return Standing.MOVE if rules.awaited(transaction, job) else Standing.HELD

    def place(self, claim: Claim, directory: str) -> bool:
        """Record the job's folder; False if the claim is lost."""
        if directory != checks.storable(directory):
            raise JobError(f"the folder of job {claim.job.name} is {directory!r}; expected a printable path")
        return self._change(claim, lambda job, now_s: replace(job, directory=directory))

    @_in_transaction
    def finish(
        self, transaction: Transaction, claim: Claim, status: Status, progress: Progress, result: dict[str, Any]
    ) -> bool:
        """Finish the job as SUCCEEDED, FAILED or CANCELLED; False (and nothing changes) if the claim is lost.

        After a StoreError it may have succeeded anyway: the same call then returns True.
        """
        if not status.state.finished:
            expected = "expected SUCCEEDED, FAILED or CANCELLED"
            raise JobError(f"job {claim.job.name} cannot finish as {status.state}; {expected}")
        plain = checks.plain("result", result)
        job = rules.held(transaction, claim)
        if job is None:
            # An earlier call whose answer was lost may have done it: no other process ends this attempt this way.
            last = transaction.job(claim.job.id)
            return last is not None and (last.state, last.attempt) == (status.state, claim.attempt)
        ended = _ended(job, status, transaction.now_s)
        transaction.put(replace(ended, progress=progress, result=plain))
        return True

    def release(self, claim: Claim, status: Status, progress: Progress, result: dict[str, Any]) -> bool:
        """Put the job back to QUEUED (or CANCELLED if that was requested); False if the claim is lost.

        After that, the job's status is ``status`` with the state QUEUED.
        """
        plain = checks.plain("result", result)
        return self._change(
            claim, lambda job, now_s: replace(_returned(job, status, now_s), progress=progress, result=plain)
        )

    @_in_transaction
    def disown(self, transaction: Transaction, owner: str) -> int:
        """Release all jobs of ``owner``, which is known to be dead; return their number."""
        running = transaction.jobs({JobState.RUNNING}, None)
        theirs = [rules.existing(transaction, job.id) for job in running if job.owner == owner]
        for job in theirs:
            transaction.put(_returned(job, Status(JobState.QUEUED, Cause.AGENT_DIED), transaction.now_s))
        return len(theirs)

    def recover(self) -> int:
        """Put jobs whose lease has expired back to QUEUED (or CANCELLED if that was requested); return their number."""
        return self._run(_recover)

    @_in_transaction
    def cancel(self, transaction: Transaction, job_id: int) -> Job:
        """Cancel a job: a QUEUED or lost one at once; a RUNNING one is ``cancelling`` until its agent stops it.

        Raises:
            JobError: there is no such job, or it has finished.
        """
        job = rules.existing(transaction, job_id)
        if transaction.repeats and job.state is JobState.CANCELLED:
            return job
        if job.state.finished:
            raise JobError(f"job {_label(job)} is {job.state}; expected a job that has not finished")
        if job.state is JobState.RUNNING and not job.lost(transaction.now_s):
            job = replace(job, cancelling=True)
        else:
            job = _ended(job, _CANCELLED, transaction.now_s)
        transaction.put(job)
        return job

    @_in_transaction
    def note(self, transaction: Transaction, job_id: int, status: Status) -> None:
        """Record why a QUEUED job still waits, as its status; a job in another state is not changed."""
        job = rules.existing(transaction, job_id)
        if job.state is JobState.QUEUED:
            transaction.put(replace(job, status=_waiting(status)))

    @_in_transaction
    def retry(self, transaction: Transaction, job_id: int) -> Job:
        """Put a FAILED, CANCELLED or lost job back to QUEUED, with its checkpoint if there is one.

        Raises:
            JobError: there is no such job, it has not finished or has succeeded, or its name is in use again.
        """
        job = rules.existing(transaction, job_id)
        lost = job.lost(transaction.now_s)
        if transaction.repeats and not lost and not job.state.finished:
            return job
        if not lost and job.state not in (JobState.FAILED, JobState.CANCELLED):
            raise JobError(f"job {_label(job)} is {job.state}; expected a FAILED or CANCELLED job")
        namesake = transaction.unfinished([job.name]).get(job.name)
        if namesake is not None and namesake.id != job.id:
            use = f"in use by the {namesake.state} job {namesake.id}"
            raise JobError(f"job {_label(job)} cannot be retried: its name is {use}")
        if lost:
            job = _expired(replace(job, cancelling=False), transaction.now_s)
        else:
            progress = replace(job.progress, failures=0)
            job = replace(job, status=Status(JobState.QUEUED), finished_s=None, progress=progress)
        transaction.put(job)
        return job

    @_in_transaction
    def forget(self, transaction: Transaction, job_ids: Collection[int], before_s: float) -> Sequence[int]:
        """Delete those of these jobs that finished before ``before_s`` and are not needed; return their numbers.

        A job is needed if a job that stays is ``after`` it, and if it is the store's newest (``rules.forgettable``).
        """
        transaction.lock_names()  # no job that is after one of these may come meanwhile
        jobs = transaction.jobs((), None)
        # Of an earlier try, whose answer was lost.
        gone = set(job_ids) - {job.id for job in jobs} if transaction.repeats else set()
        going = rules.forgettable(jobs, before_s, job_ids)
        return sorted(gone.union(transaction.drop([job.id for job in going], before_s)))

    def report_device(self, device: DeviceEntry, lease_s: float) -> None:
        """Record that a device serves jobs; it is dropped unless reported again within ``lease_s``."""
        checks.check_lease(lease_s)
        plain = replace(
            device,
            name=checks.storable(device.name),
            run=checks.storable(device.run),
            job=checks.storable(device.job),
            cycle=None if device.cycle is None else checks.plain("cycle", device.cycle),
        )
        self._run(lambda transaction: transaction.put_device(plain, lease_s))

    def forget_device(self, name: str) -> None:
        """Drop a device, which serves no more jobs."""
        self._run(lambda transaction: transaction.drop_device(checks.storable(name)))

    def devices(self) -> Sequence[DeviceEntry]:
        """The devices that serve jobs now, by name."""
        return self._run(lambda transaction: transaction.devices(), write=False)

    def profile(self, key: str) -> dict[str, Any] | None:
        """The profile kept under ``key``; None if there is none."""
        return self._run(lambda transaction: transaction.profile(key), write=False)

    def keep_profile(self, key: str, profile: dict[str, Any]) -> None:
        """Keep a profile, replacing an earlier one with that key."""
        plain = checks.plain("profile", profile)
        self._run(lambda transaction: transaction.put_profile(key, plain))

    @_in_transaction
    def _change(self, transaction: Transaction, claim: Claim, change: Callable[[Job, float], Job]) -> bool:
        """Change a claimed job; return False if the claim is lost."""
        job = rules.held(transaction, claim)
        if job is not None:
            transaction.put(change(job, transaction.now_s))
        return job is not None


def _recover(transaction: Transaction) -> int:
    expired = transaction.expired()
    for job in expired:
        transaction.put(_expired(job, transaction.now_s))
    return len(expired)


def _expired(job: Job, now_s: float) -> Job:
    return _returned(job, Status(JobState.QUEUED, Cause.LEASE_EXPIRED, str(job.owner)), now_s)


def _returned(job: Job, status: Status, now_s: float) -> Job:
    if job.cancelling:
        return _ended(job, _CANCELLED, now_s)
    return replace(job, status=_waiting(status), owner=None, lease_until_s=None)


def _waiting(status: Status) -> Status:
    return replace(_storable(status), state=JobState.QUEUED)


def _storable(status: Status) -> Status:
    return replace(status, detail=checks.storable(status.detail), device=checks.storable(status.device))


def _ended(job: Job, status: Status, now_s: float) -> Job:
    return replace(job, status=_storable(status), finished_s=now_s, owner=None, lease_until_s=None, cancelling=False)


def _label(job: Job) -> str:
    return f"{job.name} ({job.id})"
