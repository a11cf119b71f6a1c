"""Progress of a running job, its expected end, and its profile once the worker has measured it."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from megatron.fill import untrusted
from megatron.fill.agent.context import AgentContext
from megatron.fill.pages.steplog import StepLog
from megatron.fill.profiles import MeasuredJob
from megatron.fill.store.port import Job, JobStore, Progress
from megatron.fill.worker.profiler import PROFILE

logger = logging.getLogger("pipefill.agent")

_TELL_S = 5.0  # time between two estimates of the job's end


class JobForecast:
    """Forecast of one job: the thread that watches the job calls the methods, any thread reads ``done_at_s``.

    Attributes:
        done_at_s: expected end in seconds since the epoch; infinity if unknown.
    """

    def __init__(self, context: AgentContext, job: Job, directory: Path, progress: Callable[[], Progress]) -> None:
        self.done_at_s = math.inf
        self._context = context
        self._job = job
        self._directory = directory
        self._progress = progress
        self._told_s = time.monotonic()
        self._profile_kept = False

    def look(self) -> None:
        """Update the forecast; called a few times a second."""
        if time.monotonic() - self._told_s > _TELL_S:
            self._told_s = time.monotonic()
            self.done_at_s = self._context.ranking.done_at_s(self._progress(), self._directory)
        self.keep_profile()

    def keep_profile(self) -> None:
        """Keep the profile in the store once the worker has measured it."""
        job, path, ranking = self._job, self._directory / PROFILE, self._context.ranking
        if self._profile_kept or not os.path.lexists(path):
            return
        try:
            measured = MeasuredJob.from_dict(untrusted.read_json(path))
        except (OSError, ValueError) as error:
            logger.warning("job %s: its profile cannot be read: %s", job.name, error)
            self._profile_kept = True
            return
        ranking.remember(job, measured)

        def keep(store: JobStore) -> bool:
            store.keep_profile(ranking.key(job), measured.to_dict())
            return True

        self._profile_kept = bool(self._context.claims.ask(keep))


def progress_of(job: Job, log: StepLog, began_s: float) -> Progress:
    """Return the job's progress, from its worker's step log.

    Args:
        began_s: start of the attempt (``time.monotonic``).
    """
    # Before the checkpoint is loaded, the log does not include earlier work.
    began = bool(log.serving_ns or log.step_count)
    done = log.base_work + log.work_done if began else job.progress.work_done
    elapsed_s = time.monotonic() - began_s
    rate = log.work_done / elapsed_s if log.work_done and elapsed_s > 0 else job.progress.rate
    before = job.progress
    startup_s = log.serving_ns / 1e9 - began_s
    return Progress(
        work_done=done,
        total_work=log.total_work or before.total_work,
        unit=log.unit or before.unit,
        rate=rate,
        steps=before.steps + log.step_count,
        harvested_s=before.harvested_s + log.harvested_ns / 1e9,
        checkpoint_s=log.checkpoint_s or before.checkpoint_s,
        resumable=log.resumable,
        startup_s=startup_s if 0 <= startup_s <= elapsed_s else None,
        failures=before.failures,
    )
