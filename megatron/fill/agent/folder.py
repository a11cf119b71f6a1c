"""A job's folder: made, cleared of what an earlier attempt said, and never outside of where it belongs."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from megatron.fill.agent.admission import JobUser
from megatron.fill.linux import safefile
from megatron.fill.sidetask.base import RESULT
from megatron.fill.store.port import Job
from megatron.fill.worker.profiler import PROFILE

logger = logging.getLogger("pipefill.agent")

JOBS = "jobs"  # in the run folder
OUTPUT = "output.log"
_LEAVING_S, _LOOK_S = 2.0, 0.05
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def folder_name(job: Job) -> str:
    """``NAME-NUMBER``; a name that is more than a name (the store takes any) has no say in where files go."""
    return f"{job.name}-{job.id}" if _PLAIN.fullmatch(job.name) else f"job-{job.id}"


def job_folder(run_dir: Path, job: Job, user: JobUser | None) -> Path | None:
    """The job's folder: where it was before, or in the run folder; None if it cannot be made.

    Args:
        user: whom it is to belong to, if not us.
    """
    before = Path(job.directory)
    known = job.directory and before.is_absolute() and (before.parent.name, before.name) == (JOBS, folder_name(job))
    for directory in [before] * bool(known) + [run_dir / JOBS / folder_name(job)]:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _hand_over(directory, user)
            for stale in (PROFILE, RESULT):
                safefile.remove(directory / stale)
            with contextlib.suppress(FileNotFoundError):  # of an earlier attempt
                os.replace(directory / OUTPUT, directory / f"output-{job.attempt - 1}.log")
        except OSError as error:
            logger.warning("job %s: its folder %s cannot be used: %s", job.name, directory, error)
        else:
            return directory
    return None


@contextlib.contextmanager
def occupied(directory: Path) -> Iterator[None]:
    """Keep every other worker out of the folder: after a jump of the clock two agents may believe a job to be theirs.

    Whoever gave the job back a moment ago is waited for.

    Raises:
        OSError: somebody is in there.
    """
    until_s = time.monotonic() + _LEAVING_S
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while not _locked(fd, directory):
            if time.monotonic() >= until_s:
                raise OSError(f"another worker is still in {directory}")
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(fd)


def _locked(fd: int, directory: Path) -> bool:
    """Lock it for ourselves; False if somebody else has."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system that cannot
        logger.info("%s cannot be locked: %s", directory, error)
    return True


def _hand_over(directory: Path, user: JobUser | None) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if user is not None:
            os.fchown(fd, user.uid, user.gid)
    finally:
        os.close(fd)
