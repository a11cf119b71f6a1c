"""Jobs that do not fit the bubbles of a rank, and the messages to their users."""

from __future__ import annotations

from megatron.fill.pages.board import CycleBoardReader
from megatron.fill.store.port import Job, JobStore


class Misfits:
    """Remembers which jobs do not fit, until the board shows another cycle; for any thread.

    Args:
        device: the device's name, for users.
        board: the page with its bubble cycle.
    """

    def __init__(self, device: str, board: CycleBoardReader) -> None:
        self._says = f"does not fit {device}: "
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

    def reason(self, why: str) -> str:
        """Return the message to the user of a job that does not fit."""
        return self._says + why

    def withdraw(self, store: JobStore, job: Job) -> None:
        """Clear the job's message of an earlier cycle: the job now has a plan here, or it is not known yet."""
        if job.reason.startswith(self._says):
            store.note(job.id, "")
