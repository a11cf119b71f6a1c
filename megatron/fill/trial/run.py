"""Tries a job: in a first run until it is saved, and in a second one, in a new process, from that checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from megatron.fill.given.jobs import JobSpec
from megatron.fill.store import Job, open_store
from megatron.fill.trial.examine import Examined
from megatron.fill.trial.judge import judge
from megatron.fill.trial.result import Ended, Options, Trial
from megatron.fill.trial.spec import StandInSpec
from megatron.fill.trial.train import TrialTraining, train
from megatron.fill.types import JobState
from megatron.fill.worker import checkpoint

_AT_ONCE_S = 0.001  # time between two checkpoints, so that one is written after every bubble


def refused(job: JobSpec, found: Examined, device: str) -> Trial:
    """Return the result for a job that failed the check of ``examine`` and is not run."""
    return Trial(
        job=job.name,
        what=job.what,
        device=device,
        ended=Ended.FAILED if found.raised else Ended.REFUSED,
        reason=found.error,
        command=job.command is not None,
        memory_bytes=job.memory,
        output=found.trace.splitlines(),
    )


def try_job(
    job: JobSpec, found: Examined, search: Sequence[str], options: Options, folder: Path, say: Callable[[str], None]
) -> Trial:
    """Run a job in the bubbles of a stand-in that only waits, and return the result.

    Args:
        found: the findings of ``examine``, without an error.
        folder: new folder for all files; the user that jobs run as must be able to enter it.

    Raises:
        FillError: jobs cannot be tried on this machine.
    """
    folder.mkdir(exist_ok=True)
    where = str(folder / "jobs.db")
    with closing(open_store(where)) as store:
        alone = job.model_copy(update={"after": (), "retries": 0})
        [submitted] = store.submit([alone.to_submit(list(search), "")])
        runs: list[TrialTraining] = []
        size_bytes = 0
        for name in ("first", "second") if options.round_trip and found.resumable else ("only",):
            say(f"{job.name}: {_DOES[name].format(options.seconds)}")
            spec = StandInSpec(
                run_dir=str(folder / name),
                store=where,
                search=list(search),
                device=options.device,
                bubble_s=options.bubble_ms / 1000,
                period_s=options.period_ms / 1000,
                settings=options.settings | ({"checkpoint_seconds": _AT_ONCE_S} if name == "first" else {}),
            )
            enough = _enough(options, store.get(submitted.id), until_saved=name == "first")
            runs.append(train(spec, store, submitted.id, enough))
            if len(runs) == 1:
                for note in runs[0].notes:
                    say(note)
            ended = runs[-1].job
            if ended.state is not JobState.QUEUED or not _saved(ended):
                break
            size_bytes = size_bytes or os.lstat(Path(ended.directory) / checkpoint.NAME).st_size
    return judge(job, found, runs, size_bytes, options)


_DOES = {
    "first": "starts it, and saves it after its first bubble",
    "second": "goes on with it in a new process, {:g} s of bubbles",
    "only": "starts it, {:g} s of bubbles",
}


def _enough(options: Options, before: Job, until_saved: bool) -> Callable[[Job], bool]:
    """Return what decides when a run that begins now, of the job ``before`` it, has been long enough."""
    end_s = time.monotonic() + options.startup_seconds

    def enough(job: Job) -> bool:
        if until_saved and _saved(job):
            return True
        startup_s = job.progress.startup_s
        # Until its first heartbeat, the store has the values of the run before.
        known = job.attempt > before.attempt and startup_s != before.progress.startup_s
        if not known or startup_s is None or job.started_s is None:
            return time.monotonic() > end_s
        return time.time() > job.started_s + startup_s + options.seconds

    return enough


def _saved(job: Job) -> bool:
    return bool(job.directory) and os.path.lexists(Path(job.directory) / checkpoint.NAME)
