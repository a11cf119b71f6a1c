"""``pipefill evaluate``: evaluates the checkpoints that a training's bubbles had no time for, on this machine."""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megatron.fill.cli import views
from megatron.fill.cli.options import Device, JobName, Json, Store, checked_device, opened
from megatron.fill.console import progress
from megatron.fill.display import counted
from megatron.fill.errors import ConfigError, JobError, TaskError
from megatron.fill.folders import JOBS, output_file, run_of
from megatron.fill.status import Cause, JobState, Status
from megatron.fill.store import Job, JobStore
from megatron.fill.store.values import Standing

if TYPE_CHECKING:
    from megatron.fill.store.values import Claim

_TASK = "megatron.fill.wings.llm:EvaluateCheckpoints"
_LEASE_S, _BEAT_S = 120.0, 3.0  # a step here may be longer than one in a bubble
_LOOK_S = 0.05  # while a checkpoint is read
_ENDS = {
    Standing.MOVE: "a training has asked for the job",
    Standing.CANCELLED: "the job was cancelled",
    Standing.LOST: "the job was taken by a training",
}


class _Ended(Exception):
    """The job must be given back; the message is the reason."""


def evaluate(name: JobName, store: Store = None, device: Device = None, as_json: Json = False) -> None:
    """Evaluate the checkpoints that a job of EvaluateCheckpoints has left, on this machine's device, at full speed.

    The job ends with the bubbles of its training: what the training saved at its very end is left, and whatever the
    bubbles had no time for. This takes the job as a training does, with its arguments, code and samples, adds to the
    results in the job's folder, and puts the job back into the queue. It is for the user who trained.

    Exits with 0 if all complete checkpoints are evaluated, 1 if it ended before that, 2 if something makes no sense,
    130 if it was interrupted; what was evaluated is kept.

    --json prints job (its name), evaluations (the file), evaluated (the new lines of it) and seconds.
    """
    from megatron.fill.wings.llm.evaluations import EVALUATIONS, as_text, read_evaluations
    from megatron.fill.wings.llm.megatron import checkpoints

    where = checked_device(device)
    status, why = 0, ""
    with opened(store) as jobs:
        job = jobs.find(name)
        _check(job, jobs.now_s())
        with _held(jobs, job) as claim:
            directory = _folder(jobs, claim, store)
            before, begun_s = read_evaluations(directory), time.perf_counter()
            try:
                _work(jobs, claim, directory, where, as_json)
            except KeyboardInterrupt:
                status, why = 130, "interrupted"
            except (TaskError, _Ended) as error:
                status, why = 1, str(error)
            seconds = time.perf_counter() - begun_s
            found = read_evaluations(directory)
            new = [line for iteration, line in found.items() if line != before.get(iteration)]
            if new:
                waits = Status(JobState.QUEUED, Cause.EVALUATED, str(len(new)))
                result = job.result | {name: value for name, value in new[-1].items() if name != "samples"}
                behind = set(checkpoints(Path(job.work.args["checkpoints"]))) - set(found)
                result |= {"evaluated": len(found), "behind": len(behind)}
                jobs.release(claim, waits, job.progress, result)
    file = directory / EVALUATIONS
    if as_json:
        views.print_json({"job": job.name, "evaluations": str(file), "evaluated": new, "seconds": round(seconds, 3)})
    else:
        for line in new:
            print(as_text(line))
        took = f"{len(new)} evaluated in {seconds:.1f} s on {where}" if new else "none was left to evaluate"
        print(f"{took}; {counted(len(found), 'checkpoint')} in {file}.")
    if why:
        print(f"pipefill: {job.name}: {why}", file=sys.stderr)
    raise typer.Exit(status)


def _work(jobs: JobStore, claim: Claim, directory: Path, device: str, quiet: bool) -> None:
    """Evaluate the remaining checkpoints, and renew the job's lease in the meantime.

    Raises:
        JobError: another process uses the job's folder.
        TaskError: a checkpoint cannot be evaluated.
        _Ended: the job must be given back.
    """
    from megatron.fill.agent.folder import occupied

    beat_s = time.monotonic()
    with _logging(directory) as logger, progress(quiet) as shown:
        bar = shown.add_task(claim.job.name, total=None)

        def told(done: int, total: int) -> None:
            nonlocal beat_s
            shown.update(bar, completed=done, total=total)
            if time.monotonic() - beat_s < _BEAT_S:
                return
            standing, beat_s = jobs.heartbeat(claim, claim.job.progress, _LEASE_S), time.monotonic()
            if standing in _ENDS:
                raise _Ended(_ENDS[standing])

        try:
            with occupied(directory):
                evaluate_alone(claim.job.work.args, directory, device, logger, told)
        except OSError as error:
            raise JobError(f"job {claim.job.name!r}: {error}") from error


def evaluate_alone(
    args: Mapping[str, Any], folder: Path, device: str, logger: logging.Logger, told: Callable[[int, int], None]
) -> None:
    """Evaluate every complete checkpoint that is not in the folder's ``evaluations.jsonl``, at full speed.

    It is the job's own code, with its samples and its results: the loss is that which the job would have found.

    Args:
        args: arguments of ``EvaluateCheckpoints``.
        folder: the job's folder, which no worker uses; each result is written there as soon as it is known.
        logger: logs each result.
        told: called after every step with the number of checkpoints evaluated here and of those to do, the one in
            progress included; an exception from it ends the work.

    Raises:
        FillError: an argument is wrong, or a checkpoint cannot be evaluated.
        OSError: a result cannot be written.
    """
    from megatron.fill.sidetask.base import TaskContext
    from megatron.fill.wings.llm.evaluate import EvaluateCheckpoints
    from megatron.fill.wings.llm.evaluations import publish, read_evaluations, write_evaluations

    known = read_evaluations(folder)
    with tempfile.TemporaryDirectory(prefix="pipefill-evaluate-") as name:
        private = Path(name)  # the job may have left links in its own
        write_evaluations(private, known.values())
        task = EvaluateCheckpoints()
        task.context = TaskContext(folder.name, private, device, logger=logger)
        try:
            try:
                task.create(**args)
            except (TypeError, ValueError) as error:
                raise TaskError(f"the job's args are wrong: {error}") from error
            done, left = 0, len(task.left())
            if left:
                task.init()
            while left:
                if task.run_next_step():
                    publish(private, folder)
                    done += 1
                if not task.busy:
                    left = len(task.left())
                told(done, done + left)
                if task.idle:
                    time.sleep(_LOOK_S)
        finally:
            task.stop()


def _check(job: Job, now_s: float) -> None:
    """Check that the job evaluates checkpoints and is free.

    Raises:
        JobError: the job has other work, has ended or is running.
        ConfigError: its folder of checkpoints is not on this machine.
    """
    if job.work.task != _TASK:
        raise JobError(f"job {job.name!r} is {job.work.what}: expected a job of {_TASK}")
    if job.state.finished:
        raise JobError(f"job {job.name!r} is {job.state}: expected pipefill retry {job.name} before")
    if job.owner is not None and not job.lost(now_s):
        raise JobError(f"job {job.name!r} is RUNNING ({job.device}): expected that you wait until that has ended")
    folder = Path(str(job.work.args.get("checkpoints")))
    if not folder.is_dir():
        raise ConfigError(f"checkpoints of job {job.name!r} is {folder}: expected a folder that this machine sees")


@contextmanager
def _held(jobs: JobStore, job: Job) -> Iterator[Claim]:
    """Claim the job as an agent does, so that no training takes it in the meantime.

    Raises:
        JobError: a training has claimed it first.
    """
    here = f"pipefill evaluate on {socket.gethostname()}"
    claim = jobs.claim(f"{here}, pid {os.getpid()}", [job.id], _LEASE_S, here)
    if claim is None:
        raise JobError(f"job {job.name!r} was taken by a training just now: expected that you wait until it has ended")
    try:
        yield claim
    finally:
        jobs.release(claim, job.status, job.progress, job.result)  # has no effect if it was released before


def _folder(jobs: JobStore, claim: Claim, store: str | None) -> Path:
    """Return the job's folder, which is created if the job never began; JobError if the folder cannot be used."""
    from megatron.fill.agent.admission import default_user
    from megatron.fill.agent.folder import folder_name, is_known, job_folder
    from megatron.fill.store.location import JOBS_DB, database_file

    job = claim.job
    file, before, name = database_file(str(store)), Path(job.directory), folder_name(job)
    if is_known(before, name):
        run = run_of(before)
    elif file is not None and file.name == JOBS_DB:
        run = file.parent.resolve()
    else:
        raise JobError(f"job {job.name!r} has no folder of this user's: expected the run folder as --store")
    found = job_folder(run, job, None if (run / JOBS / name).is_dir() else default_user())
    if found is None or not jobs.place(claim, str(found)):
        raise JobError(f"job {job.name!r}: its folder in {run} cannot be used: expected the user who trained")
    return found


@contextmanager
def _logging(directory: Path) -> Iterator[logging.Logger]:
    """A logger that writes to the job's output, which pipefill logs shows."""
    logger, handler = logging.getLogger("pipefill.evaluate"), logging.FileHandler(output_file(directory))
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        handler.close()
