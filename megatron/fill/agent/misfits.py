"""Which jobs were found not to fit the bubbles of a rank, and what their users are told."""

from __future__ import annotations

from megatron.fill.pages.board import CycleBoardReader
from megatron.fill.store.port import Job, JobStore


class Misfits:
    """What was found counts until the board shows another cycle.  For any thread.

    Args:
        device: as users know it.
        board: its bubble cycle.
    """

    def __init__(self, device: str, board: CycleBoardReader) -> None:
        self._says = f"does not fit {device}: "
        self._board = board
        self._tried: dict[tuple[int, bool], int] = {}  # (job, as tail job) -> the board's version then
        self._planned: dict[int, int] = {}  # job -> the board's version then

    def tried(self, job_id: int, tail: bool) -> None:
        """A worker found that there is no bubble for this job."""
        self._tried[job_id, tail] = self._board.version

    def may_fit(self, job_id: int, tail: bool) -> bool:
        """Whether no worker has found otherwise."""
        return self._tried.get((job_id, tail)) != self._board.version

    @property
    def refused(self) -> tuple[int, ...]:
        """The jobs that are known not to fit."""
        version = self._board.version
        # Copies: other threads write them meanwhile.
        tried = {job_id for (job_id, tail), then in self._tried.copy().items() if then == version and not tail}
        planned = {job_id for job_id, then in self._planned.copy().items() if then == version}
        return tuple(sorted(tried | planned))

    def planned(self, job_id: int) -> bool:
        """This job has no plan here; whether that is news."""
        then, self._planned[job_id] = self._planned.get(job_id), self._board.version
        return then != self._planned[job_id]

    def reason(self, why: str) -> str:
        """What the user of a job that does not fit is told."""
        return self._says + why

    def withdraw(self, store: JobStore, job: Job) -> None:
        """The job has a plan here, or nobody knows: what its user was told of another cycle is not so any more."""
        if job.reason.startswith(self._says):
            store.note(job.id, "")
