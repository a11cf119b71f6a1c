"""The waiting jobs: those that may begin, those that a tail seat may take, and those that do not fit the bubbles."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.fill.pages.board import CycleBoardReader
from megatron.fill.status import Cause, JobState, Status
from megatron.fill.store.port import DeviceEntry, Job, JobStore


def may_begin(store: JobStore, waiting: Sequence[Job]) -> Sequence[Job]:
    """Return the waiting jobs without those whose prerequisites (``after``) have not all succeeded."""
    firsts = {first for job in waiting for first in job.work.after}
    if not firsts:
        return waiting
    done = {name for name, state in store.states(firsts).items() if state is JobState.SUCCEEDED}
    return [job for job in waiting if done.issuperset(job.work.after)]


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
    """Remembers which jobs do not fit, until the board shows another cycle; for any thread.

    Args:
        device: the device's name.
        board: the page with its bubble cycle.
    """

    def __init__(self, device: str, board: CycleBoardReader) -> None:
        self._device = device
        self._board = board
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
