"""The folder of a job, cleared of an earlier attempt's results and locked while in use, and the job's output."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

from megatron.fill.agent.admission import JobUser
from megatron.fill.agent.ending import Ending, How
from megatron.fill.folders import JOBS, PROFILE, lock_file, output_file
from megatron.fill.linux import safefile
from megatron.fill.sidetask.base import RESULT
from megatron.fill.status import Cause
from megatron.fill.store.values import Job

logger = logging.getLogger("pipefill.agent")

_LEAVING_S, _LOOK_S = 2.0, 0.05
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
KEPT_BYTES = 512 * 1024


def folder_name(job: Job) -> str:
    """Return ``NAME-NUMBER``, or ``job-NUMBER`` for a name with other characters, which could lead elsewhere."""
    return f"{job.name}-{job.id}" if _PLAIN.fullmatch(job.name) else f"job-{job.id}"


def job_folder(run_dir: Path, job: Job, user: JobUser | None) -> Path | None:
    """Return the job's folder, the one of its earlier attempt or a new one in the run folder; None if neither works.

    The earlier folder comes from the store, to which others write.  It is used only if an agent of this user has made
    it for a job of this name (``is_known``); no other folder is made, changed or handed over to ``user``.
    """
    own, before = run_dir / JOBS / folder_name(job), Path(job.directory)
    for directory in [before] * (before != own and is_known(before, folder_name(job))) + [own]:
        try:
            if directory == own:
                directory.mkdir(parents=True, exist_ok=True)
            _hand_over(directory, user)
            for stale in (PROFILE, RESULT):
                safefile.remove(directory / stale)
            output = output_file(directory)
            output.parent.mkdir(exist_ok=True)
            lock_file(directory).parent.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # the output of an earlier attempt
                os.replace(output, output_file(directory, job.attempt - 1))
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


@contextlib.contextmanager
def occupied(directory: Path) -> Iterator[None]:
    """Lock the folder against other workers: after a clock jump two agents may both hold a claim of the job.

    The lock file lies where no job can open it while the sandbox holds, since whoever can open a file can lock it.
    OSError if another worker is still in the folder, and has had time to leave.
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


class BoundedOutput:
    """Writes a job's output to a file: the first and the last ``KEPT_BYTES``, with a line on the bytes left out.

    It is also a Watcher: a job that prints more than ``most_bytes`` is ended.
    """

    def __init__(self, path: Path, most_bytes: float = inf) -> None:
        self.most_bytes = most_bytes
        self._file = os.fdopen(safefile.create(path), "wb", buffering=0)
        self._tail = bytearray()
        self._unwritten_bytes = 0
        self.total_bytes = 0

    @property
    def full(self) -> bool:
        """True if no more output is to be read; a job that prints more then blocks until it is ended."""
        return self.total_bytes > self.most_bytes

    def look(self) -> Ending | None:
        if not self.full:
            return None
        return Ending(How.FAIL, Cause.OUTPUT, f"{self.most_bytes / 2**20:g}")

    def write(self, data: bytes) -> None:
        room = max(0, KEPT_BYTES - self.total_bytes)
        self.total_bytes += len(data)
        if room:
            self._put(data[:room])
        if len(data) > room:
            self._tail += data[room:]
            del self._tail[:-KEPT_BYTES]

    def close(self) -> None:
        left_out = self.total_bytes - KEPT_BYTES - len(self._tail)
        if left_out > 0:
            self._put(f"\n[... {left_out} bytes left out ...]\n".encode())
        self._put(bytes(self._tail))
        if self._unwritten_bytes:
            self._put(f"\n[{self._unwritten_bytes} bytes could not be written]\n".encode())
        self._file.close()

    def _put(self, data: bytes) -> None:
        """Write as much as possible: a full disk loses output, and does no other harm."""
        try:
            written = self._file.write(data) or 0
        except OSError:
            written = 0
        self._unwritten_bytes += len(data) - written
