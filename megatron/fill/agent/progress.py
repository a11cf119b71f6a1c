"""Progress of a job, for the store."""

from __future__ import annotations

import time

from megatron.fill.pages.steplog import StepLog
from megatron.fill.store.port import Job, Progress


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
