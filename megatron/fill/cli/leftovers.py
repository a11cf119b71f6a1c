"""The leftovers of old trainings: which of them may go, how much disk they take, and their removal.

A run goes as a whole if its training has ended, nothing was written in it for the given time, and no job that stays in
a store has its folder there.  Of any other run go the folders of jobs that finished that long ago.  Rows of jobs go
first, so that nobody can put a job back into the queue whose folder is about to go.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from megatron.fill.agent.claims import SUBMITTED
from megatron.fill.agent.folder import folder_name, is_known
from megatron.fill.errors import FillError, StoreError
from megatron.fill.folders import AGENTS, CONTROL, JOBS, LOCKS, OUTPUT, RECORDS, RUN_LOCK, lock_file, output_file
from megatron.fill.linux import recordlock, safefile
from megatron.fill.records.segment import SegmentEnding, read_segments
from megatron.fill.store import Job, JobStore, open_store
from megatron.fill.store.location import JOBS_DB, database_file, database_files, locate, shown
from megatron.fill.store.rules import forgettable
from megatron.fill.types import JobState

_REPORTS = ("report.json", "report.html", "trace.json", "timeline.png", "bubbles.json")
# The records go last: without them, what an interrupted removal has left would be no run folder any more.
_FIRST, _LAST = (JOBS, OUTPUT, LOCKS, AGENTS, CONTROL, "mps", *_REPORTS, SUBMITTED), RECORDS
_UNFINISHED = [state for state in JobState if not state.finished]


@dataclass(slots=True)
class Left:
    """The leftovers of one run."""

    run: Path  # its folder, without links
    stores: tuple[str, ...] = ()  # names of the stores that it served
    stays: str = ""  # the reason why the run stays; empty if it goes as a whole
    # the jobs that go and have their folders there, each with the name of its store
    jobs: list[tuple[str, Job]] = field(default_factory=list)
    # the files and folders that go, with the disk space in bytes that it takes
    paths: dict[Path, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(self.paths.values())


class Leftovers:
    """The leftovers of some runs in their folders and stores.

    Args:
        older_s: time in s since which nothing of what goes may have changed.
        given: a store as the user names it, for one whose password the records do not have; None for none.

    Raises:
        FillError: none of the folders is that of a run.
    """

    def __init__(self, runs: Sequence[Path], older_s: float, given: str | None = None) -> None:
        self._older_s = older_s
        self._given = {} if given is None else {_name(given): given}
        self._opened: dict[str, JobStore] = {}
        self.rows: dict[str, list[Job]] = {}  # the jobs that go, by the name of their store
        self.runs: list[Left] = []
        self.failures: list[str] = []  # folders that are no runs, and what could not be removed, and why
        for run in dict.fromkeys(run.resolve() for run in runs):
            try:
                self.runs.append(Left(run, _served(run)))
            except FillError as error:  # runs/* also matches what is no run; the others need not stay for it
                self.failures.append(str(error))
        if not self.runs:
            raise FillError("\n".join(self.failures))

    def close(self) -> None:
        for store in self._opened.values():
            store.close()

    def find(self) -> None:
        """Find what may go."""
        for left in self.runs:
            unread = self._unread(left)  # which opens its stores
            left.stays = _used(left.run, self._older_s) or unread
        for where, store in self._opened.items():
            self._find_jobs(where, store)
        for left in self.runs:
            paths = _of_jobs(left.jobs) if left.stays else _whole(left.run)
            left.paths = {path: safefile.disk_bytes(path) for path in paths}

    def _find_jobs(self, where: str, store: JobStore) -> None:
        by_folder = {str(left.run / JOBS): left for left in self.runs}
        jobs, before_s = store.list(), store.now_s() - self._older_s
        ids = {job.id for job in jobs if _may_go(job, before_s, by_folder)}
        going = self.rows[where] = forgettable(jobs, before_s, ids)
        gone = {job.id for job in going}
        own = self._owner(where)
        if own is not None and not own.stays:
            own.stays = _still(store, jobs, before_s, own.run)
        for job in jobs:
            left = by_folder.get(str(Path(job.directory).parent)) if job.directory else None
            if left is None:
                continue
            if job.id in gone:
                left.jobs.append((where, job))
            elif not left.stays and left is not own:
                left.stays = f"job {job.name} ({job.id}), which stays, has its folder there"

    def remove(self) -> None:
        """Remove what ``find`` has found; afterwards the attributes say what was removed."""
        with contextlib.ExitStack() as locks:
            for left in self.runs:
                if not left.stays and (not locks.enter_context(_held(left.run)) or _used(left.run, self._older_s)):
                    left.stays, left.paths = "a training has begun in it", {}
            for where, jobs in self.rows.items():
                self._forget(where, {job.id for job in jobs})
            for left in self.runs:
                self._remove(left)

    def _forget(self, where: str, ids: Set[int]) -> None:
        """Delete rows of jobs; what belongs to one that was put into the queue in the meantime stays."""
        store, own = self._opened[where], self._owner(where)
        forgotten = set(store.forget(ids, store.now_s() - self._older_s))
        self.rows[where] = [job for job in self.rows[where] if job.id in forgotten]
        needed = own is not None and not own.stays and bool(store.list(_UNFINISHED, limit=1))
        for left in self.runs:
            back = [(at, job) for at, job in left.jobs if at == where and job.id not in forgotten]
            if back or (needed and left is own):
                left.jobs = [one for one in left.jobs if one not in back]
                left.stays = left.stays or "a job was put into its queue"
                kept = _of_jobs(left.jobs)
                left.paths = {path: size for path, size in left.paths.items() if path in kept}

    def _remove(self, left: Left) -> None:
        removed: dict[Path, int] = {}
        for path, size_bytes in left.paths.items():
            try:
                safefile.remove(path)
            except OSError as error:
                self.failures.append(str(error) if error.filename is None else f"{path}: {error.strerror}")
                left.stays = left.stays or "not all of it can be removed"
                break  # what is left can be removed by the next call, as long as the records are there
            removed[path] = size_bytes
        left.paths = removed
        if not left.stays:
            with contextlib.suppress(OSError):  # something that is not PipeFill's is in it
                (left.run / RUN_LOCK).unlink(missing_ok=True)
                left.run.rmdir()

    def _unread(self, left: Left) -> str:
        """Open the stores of a run; return why one of them cannot be read, for then nothing of the run may go."""
        for where in left.stores:
            try:
                if where not in self._opened:
                    self._opened[where] = open_store(self._given.get(where, where), create=False)
            except StoreError as error:
                left.stores = ()
                return f"its jobs are not known: {error}"
        return ""

    def _owner(self, where: str) -> Left | None:
        """Return the run in whose folder a store is; None if it is in none of these."""
        return next((left for left in self.runs if where == _name(str(left.run))), None)


def _name(where: str) -> str:
    """Return the one name of a store, without its password."""
    file = database_file(where)
    return shown(locate(where)) if file is None else str(file.resolve())


def _served(run: Path) -> tuple[str, ...]:
    """Return the names of the stores that a run served."""
    own = run / JOBS_DB
    names = {_name(segment.store) for segment in read_segments(run) if segment.store}
    if own.exists():
        # A run folder that was moved has its store with it; the records have the store's former place.
        names = {name for name in names if not (Path(name).name == JOBS_DB and not os.path.exists(name))}
        return tuple(sorted({*names, _name(str(run))}))
    return tuple(sorted(names - {_name(str(run))}))  # without its own store a run has no jobs in one


def _used(run: Path, older_s: float) -> str:
    """Return why a run stays whatever is in its stores, or empty.  Files that jobs can write do not count."""
    segments = read_segments(run)
    if any(segment.ending is SegmentEnding.RUNNING for segment in segments):
        return "its training runs"
    folders = [run / AGENTS, *(segment.folder for segment in segments)]
    changed = [_changed_s(path) for folder in folders for path in (folder, *folder.glob("*"))]
    last_s = max([*changed, *(segment.ended_s or 0.0 for segment in segments)])
    if last_s >= time.time() - older_s:
        return f"last used {time.strftime('%Y-%m-%d %H:%M', time.localtime(last_s))}"
    link = next((path for path in _whole(run) if path.is_symlink()), None)
    return "" if link is None else f"{link.name} in it is a link; expected a file or folder, as PipeFill makes it"


def _changed_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:  # a temporary file of a training that runs
        return 0.0


def _may_go(job: Job, before_s: float, by_folder: Mapping[str, Left]) -> bool:
    """True if the row of a job may go: its folder is in one of the runs, or is not there any more."""
    if job.finished_s is None or job.finished_s >= before_s:
        return False
    directory = Path(job.directory)
    if not job.directory or not os.path.lexists(directory):
        return True
    left = by_folder.get(str(directory.parent))
    return left is not None and bool(left.stores) and is_known(directory, folder_name(job))


def _still(store: JobStore, jobs: Sequence[Job], before_s: float, run: Path) -> str:
    """Return why the store in a run's folder is still needed; empty if it is not."""
    for device in store.devices():
        return f"{device.name} serves its job store"
    for job in jobs:
        if job.finished_s is None or job.finished_s >= before_s:
            return f"job {job.name} ({job.id}) in its job store is {job.state}"
        directory = Path(job.directory)
        if job.directory and directory.parent != run / JOBS and os.path.lexists(directory):
            return f"job {job.name} ({job.id}) in its job store has its folder in another run"
    return ""


def _whole(run: Path) -> list[Path]:
    """Return all that PipeFill writes into a run folder, as far as it is there; not what others have put there."""
    paths = [*(run / name for name in _FIRST), *map(Path, database_files(str(run))), run / _LAST]
    return [path for path in paths if os.path.lexists(path)]


def _of_jobs(jobs: Iterable[tuple[str, Job]]) -> list[Path]:
    """Return the folders of jobs and their files beside them, as far as they are there."""
    paths: list[Path] = []
    for _, job in jobs:
        directory = Path(job.directory)
        attempts = [output_file(directory, attempt) for attempt in range(1, job.attempt + 1)]
        paths += [directory, output_file(directory), *attempts, lock_file(directory)]
    return [path for path in paths if os.path.lexists(path)]


@contextlib.contextmanager
def _held(run: Path) -> Iterator[bool]:
    """Lock a run folder against trainings; yield False if one holds it."""
    fd = os.open(run / RUN_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    held = True  # a file system without locks keeps no training out, so its age alone counts
    try:
        with contextlib.suppress(OSError):
            held = recordlock.lock(fd, 0, 0)
        yield held
    finally:
        os.close(fd)
