"""The folder of a job: made in the run folder, cleared of an earlier attempt's results, and locked while in use."""

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
    """Return ``NAME-NUMBER``, or ``job-NUMBER`` for a name with other characters, which could lead elsewhere."""
    return f"{job.name}-{job.id}" if _PLAIN.fullmatch(job.name) else f"job-{job.id}"


def job_folder(run_dir: Path, job: Job, user: JobUser | None) -> Path | None:
    """Return the job's folder, the one of its earlier attempt or a new one in the run folder; None if neither works.

    The earlier folder comes from the store, to which others write.  It is used only if it is a job folder of this name
    that an agent of this user has made (``is_known``); no other folder is made, changed or handed over.

    Args:
        user: new owner of the folder; None for the user of this process.
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
    """True if an agent of this user made it as the folder of a job of this name, and no link is on the path."""
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
    """Rename the output of an earlier attempt, and make the folders of output and lock."""
    output = output_file(directory)
    output.parent.mkdir(exist_ok=True)
    lock_file(directory).parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.replace(output, output_file(directory, attempt - 1))


@contextlib.contextmanager
def occupied(directory: Path) -> Iterator[None]:
    """Lock the folder against other workers: after a clock jump two agents may both hold a claim of the job.

    A worker that has just given the job back gets time to leave.  The lock file lies where no job can open it while
    the sandbox holds, since a file can be locked by any process that can open it, even only to read.

    Raises:
        OSError: another worker is still in the folder.
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
    """Lock the file; False if another process holds the lock.  True without a lock if the file system has none."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        logger.info("%s cannot be locked: %s", directory, error)
    return True


def _hand_over(directory: Path, user: JobUser | None) -> None:
    fd = safefile.open_folder(directory)
    try:
        if user is not None:
            os.fchown(fd, user.uid, user.gid)
    finally:
        os.close(fd)
