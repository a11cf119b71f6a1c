"""A run of the stand-in for a training, and its records, which are those of any run."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.fill import untrusted
from megatron.fill.errors import FillError
from megatron.fill.linux.isolated import program
from megatron.fill.records.segment import RankFiles, last_segment
from megatron.fill.store.queue import JobStore
from megatron.fill.store.values import Job
from megatron.fill.trial.spec import NOTE, StandInSpec
from megatron.fill.types import JobRecord, JobState, RankRecord, WorkerRecord

_LOOK_S = 0.1
_END_S = 60.0  # time limit for its end: longer than its own wait for the warden


@dataclass(frozen=True, slots=True)
class TrialTraining:
    """The records of a run."""

    job: Job  # in the store after the run
    record: JobRecord | None  # of the job's first attempt in the run; None if there was none
    worker: WorkerRecord | None  # of that attempt
    rank: RankRecord | None  # of the stand-in; None if it failed
    notes: list[str]  # of the stand-in on the sandbox of its jobs


def train(spec: StandInSpec, store: JobStore, job_id: int, enough: Callable[[Job], bool]) -> TrialTraining:
    """Run the stand-in until the job has ended, or ``enough`` returns True for it; FillError if it ends by itself."""
    before = store.get(job_id).attempt
    log = Path(f"{spec.run_dir}.log")
    with _standin(spec, log) as process:
        while not _over(store.get(job_id), before) and not enough(store.get(job_id)):
            if process.poll() is not None:
                last = (_lines(log) or ["it said nothing"])[-1]
                raise FillError(f"the main job that the job is tried beside does not run: {last}")
            time.sleep(_LOOK_S)
    left = RankFiles()
    with contextlib.suppress(FillError):
        left = last_segment(Path(spec.run_dir)).files().get(0, left)
    record, worker = next(iter(left.attempts()), (None, None))
    rank = None
    with contextlib.suppress(FillError):
        rank = left.record()
    notes = [line.removeprefix(NOTE) for line in _lines(log) if line.startswith(NOTE)]
    return TrialTraining(store.get(job_id), record, worker, rank, notes)


def _over(job: Job, before: int) -> bool:
    """True if an attempt of this run has ended; a job that is queued again has failed."""
    waits_again = job.state is JobState.QUEUED and job.attempt > before
    return job.state.finished or waits_again or job.attempt > before + 1


@contextlib.contextmanager
def _standin(spec: StandInSpec, log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            program("megatron.fill.trial.standin"),
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            text=True,
            start_new_session=True,  # as a launcher starts a rank: workers yield to their own session only
        )
    assert process.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(spec.to_json() + "\n")
            process.stdin.flush()
        yield process
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # ends the process
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in untrusted.read_text(path).splitlines() if line.strip()]
    except (OSError, ValueError):
        return []
