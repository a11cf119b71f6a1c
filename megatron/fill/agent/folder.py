"""A job's folder: made, cleared of what an earlier attempt said, and never outside of where it belongs."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from megatron.fill.agent.admission import JobUser
from megatron.fill.folders import JOBS, lock_file, output_file
from megatron.fill.linux import safefile
from megatron.fill.sidetask.base import RESULT
from megatron.fill.store.port import Job
from megatron.fill.worker.profiler import PROFILE

logger = logging.getLogger("pipefill.agent")

_LEAVING_S, _LOOK_S = 2.0, 0.05
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def folder_name(job: Job) -> str:
    """``NAME-NUMBER``; a name that is more than a name (the store takes any) has no say in where files go."""
    return f"{job.name}-{job.id}" if _PLAIN.fullmatch(job.name) else f"job-{job.id}"


def job_folder(run_dir: Path, job: Job, user: JobUser | None) -> Path | None:
    """The job's folder: where it was before, or in the run folder; None if it cannot be made.

    Where it was before is what the store says, to which others write: it counts only if it is a job's folder of this
    name that an agent of this user has made.  No other is made, changed or handed over.

    Args:
        user: whom it is to belong to, if not us.
    """
    own, before = run_dir / JOBS / folder_name(job), Path(job.directory)
    for directory in [before] * (before != own and is_known(before, folder_name(job))) + [own]:
        try:
            if directory == own:
                directory.mkdir(parents=True, exist_ok=True)
            _hand_over(directory, user)
            for stale in (PROFILE, RESULT):
                safefile.remove(directory / stale)
            _make_room(directory, job.attempt)
        except OSError as error:
            logger.warning("job %s: its folder %s cannot be used: %s", job.name, directory, error)
        else:
            return directory
    return None


def is_known(directory: Path, name: str) -> bool:
    """Whether it is the folder of a job of this name, with no link on the way, that an agent of this user has made."""
    if (directory.parent.name, directory.name) != (JOBS, name):
        return False
    lock = lock_file(directory)
    try:
        for folder in (directory, lock.parent):
            os.close(safefile.open_folder(folder))
        made, mark = lock.parent.stat(), lock.lstat()
    except (OSError, ValueError) as error:
        logger.info("%s is not used: %s", directory, error)
        return False
    ours = made.st_uid == mark.st_uid == os.geteuid() and not made.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return ours and stat.S_ISREG(mark.st_mode)


def _make_room(directory: Path, attempt: int) -> None:
    """Keep what an earlier attempt printed, and have a place for the lock."""
    output = output_file(directory)
    output.parent.mkdir(exist_ok=True)
    lock_file(directory).parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.replace(output, output_file(directory, attempt - 1))


@contextlib.contextmanager
def occupied(directory: Path) -> Iterator[None]:
    """Keep every other worker out of the folder: after a jump of the clock two agents may believe a job to be theirs.

    Whoever gave the job back a moment ago is waited for.  The lock is on a file that no job can open, as far as the
    walls stand: whoever can open a file, to read it only, can lock it.

    Raises:
        OSError: somebody is in there.
    """
    until_s = time.monotonic() + _LEAVING_S
    fd = os.open(lock_file(directory), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
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
    fd = safefile.open_folder(directory)
    try:
        if user is not None:
            os.fchown(fd, user.uid, user.gid)
    finally:
        os.close(fd)
