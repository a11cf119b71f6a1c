"""One run of a main job that only waits, and what it left: the records that any run leaves."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.fill import untrusted
from megatron.fill.errors import FillError
from megatron.fill.records import RankFiles, last_segment
from megatron.fill.store.port import Job, JobStore
from megatron.fill.trial.spec import NOTE, StandInSpec, program
from megatron.fill.types import JobRecord, JobState, RankRecord, WorkerRecord

_LOOK_S = 0.1
_END_S = 60.0  # how long it may take to end: longer than it waits for its warden


@dataclass(frozen=True, slots=True)
class TrialTraining:
    """One such run.

    Attributes:
        job: as the store has it after the run.
        record: of the job's first attempt in it, with its worker's; None if there was none.
        rank: of the main job; None if it failed.
        notes: what it said of the walls around its jobs.
    """

    job: Job
    record: JobRecord | None
    worker: WorkerRecord | None
    rank: RankRecord | None
    notes: list[str]


def train(spec: StandInSpec, store: JobStore, job_id: int, enough: Callable[[Job], bool]) -> TrialTraining:
    """Run until the job has ended, or ``enough`` says so of it.

    Raises:
        FillError: the main job did not start, or ended by itself.
    """
    before = store.get(job_id).attempt
    log = Path(f"{spec.run_dir}.log")
    with _standin(spec, log) as process:
        while not _over(store.get(job_id), before) and not enough(store.get(job_id)):
            if process.poll() is not None:
                raise FillError(f"the main job that the job is tried beside does not run: {_last_line(log)}")
            time.sleep(_LOOK_S)
    left = RankFiles()
    with contextlib.suppress(FillError):
        left = last_segment(Path(spec.run_dir)).files().get(0, left)
    record, worker = next(iter(left.attempts()), (None, None))
    rank = None
    with contextlib.suppress(FillError):
        rank = left.record()
    return TrialTraining(store.get(job_id), record, worker, rank, _notes(log))


def _over(job: Job, before: int) -> bool:
    """Whether an attempt of this run has ended; what is tried again has failed."""
    waits_again = job.state is JobState.QUEUED and job.attempt > before
    return job.state.finished or waits_again or job.attempt > before + 1


@contextlib.contextmanager
def _standin(spec: StandInSpec, log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            program("standin"),
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            text=True,
            start_new_session=True,  # as a launcher starts a rank: its workers yield to it, and to nobody else
        )
    assert process.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(spec.to_json() + "\n")
            process.stdin.flush()
        yield process
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # that ends it
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _notes(log: Path) -> list[str]:
    return [line.removeprefix(NOTE) for line in _lines(log) if line.startswith(NOTE)]


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in untrusted.read_text(path).splitlines() if line.strip()]
    except (OSError, ValueError):
        return []


def _last_line(path: Path) -> str:
    return (_lines(path) or ["it said nothing"])[-1]
