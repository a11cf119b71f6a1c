"""Moves a tail job of another rank to this one when this rank has no job.

An idle rank watches the tail jobs of its run for a while, by their entries in the store, and asks for the one that
gains most (``move_gain_s``).  The job's agent learns of the request with its next heartbeat, saves the job and
gives it back.  Then only this rank can claim the job (``JobStore.ask_for``), which resumes from its checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from megatron.fill.agent.ranking import Ranking
from megatron.fill.store.queue import JobStore
from megatron.fill.store.values import DeviceEntry, Job, Progress
from megatron.fill.types import JobState

logger = logging.getLogger("pipefill.agent")

_LOOK_S = 3.0  # the period of heartbeats
_WATCH_S = 12.0  # least time over which a tail job's rate is measured
_FASTER = 1.25  # least ratio of the speeds, since both are estimates
_PAUSES = 2.0  # duration of a move in start-up times: the job is saved, stopped, claimed, started and loaded
_YIELD = 0.7  # share of bubble time that a resident job uses


def move_gain_s(speed: float, elsewhere: float, left_s: float | None, ran_s: float, startup_s: float) -> float:
    """Return the time in s by which a tail job would be done earlier on an idle device; 0 if a move is not worth it.

    It is worth it if it gains more than its own duration, and the device is considerably faster.

    Args:
        speed: current speed, per wall-clock second; in any unit, the same as ``elsewhere``.
        elsewhere: expected speed on the idle device.
        left_s: remaining time where it is; infinity if it makes no progress there, None if unknown: as long again.
        ran_s: time that it has run there.
        startup_s: start-up time of its worker.
    """
    if not 0 < elsewhere >= _FASTER * speed:
        return 0.0
    move_s = _PAUSES * startup_s
    gain_s = (ran_s if left_s is None else left_s) * (1 - speed / elsewhere) - move_s
    return gain_s if gain_s > move_s else 0.0


@dataclass(eq=False, repr=False)
class Mover:
    """Looks for a job that should move to this rank."""

    run: str  # name of this rank's run in the store
    ranking: Ranking
    fits: Callable[[Job], bool]  # returns True if the job may run here
    clock: Callable[[], float] = time.monotonic  # monotonic time in seconds
    epoch: Callable[[], float] = time.time  # seconds since the epoch

    def __post_init__(self) -> None:
        # By job and attempt: the time of the first look, and the progress then.
        self._seen: dict[tuple[int, int], tuple[float, Progress]] = {}
        self._looked_s = -inf

    def look(self, store: JobStore) -> None:
        """Ask for a job if a move is worth it; called repeatedly while this rank is idle."""
        now_s = self.clock()
        if now_s - self._looked_s < _LOOK_S:
            return
        if now_s - self._looked_s > 2 * _LOOK_S:  # the rank was busy in the meantime, so what it saw is out of date
            self._seen = {}
        self._looked_s = now_s
        devices = {device.name: device for device in store.devices() if device.run == self.run}
        tails = [job for job in store.list({JobState.RUNNING}) if self._is_movable(job, devices)]
        first = {(job.id, job.attempt): (now_s, job.progress) for job in tails}
        self._seen = {key: self._seen.get(key, seen) for key, seen in first.items()}
        gains_s = {job.id: self._gain_s(store, job, now_s) for job in tails}
        job = max(tails, key=lambda job: gains_s[job.id], default=None)
        if job is None or gains_s[job.id] <= 0 or not self.fits(job):
            return
        if store.ask_for(job.id, job.attempt, self.ranking.device):
            logger.info("job %s: asked for, %s has only a tail for it", job.name, job.device)

    def _is_movable(self, job: Job, devices: Mapping[str, DeviceEntry]) -> bool:
        """True if it is a tail job of another rank, and would lose no work by a move."""
        there = devices.get(job.device)
        if there is None or job.device == self.ranking.device or there.job in ("", job.name):
            return False
        serving = job.progress.startup_s is not None and not job.cancelling
        saves = job.work.command is None and job.progress.resumable
        return serving and saves and Path(job.directory).is_dir()  # the folder may be missing on another node

    def _gain_s(self, store: JobStore, job: Job, now_s: float) -> float:
        """Return what the job would gain by a move (``move_gain_s``); 0 before it has been watched for a while."""
        (seen_s, before), progress = self._seen[job.id, job.attempt], job.progress
        cycle, watched_s = self.ranking.board.read(), now_s - seen_s
        if cycle is None or watched_s < _WATCH_S:
            return 0.0
        work_s = (progress.work_done - before.work_done) / watched_s  # work per second
        speed = (progress.harvested_s - before.harvested_s) / watched_s
        elsewhere = _YIELD * sum(slot.duration_ns for slot in cycle.slots) / cycle.period_ns
        unit_s = self.ranking.unit_s(store, job)
        if unit_s is not None:
            speed, elsewhere = work_s, 1 / unit_s
        left_s = None
        if progress.total_work is not None:
            left = max(0.0, progress.total_work - progress.work_done)
            left_s = left / work_s if work_s > 0 else inf
        ran_s = watched_s if job.started_s is None else max(watched_s, self.epoch() - job.started_s)
        return move_gain_s(max(0.0, speed), elsewhere, left_s, ran_s, progress.startup_s or 0.0)
