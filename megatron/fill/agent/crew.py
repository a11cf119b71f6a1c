"""Worker processes of an agent: those that have a job, and a spare one for the next job."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron.fill.agent.admission import environment
from megatron.fill.agent.holder import Holder
from megatron.fill.agent.station import Station
from megatron.fill.linux import reap
from megatron.fill.linux.tree import OWN
from megatron.fill.pages.control import RunState
from megatron.fill.store.port import Job

logger = logging.getLogger("pipefill.agent")

AHEAD = ("numpy",)  # imported by most tasks, and costs little memory


class Crew:
    """Starts workers' first processes, and forgets them when they have ended; for any thread.

    The lock is held while a process is started and while orphans are ended, so that a new process is not ended as an
    orphan.
    """

    def __init__(self, station: Station) -> None:
        self._station = station
        self._working: set[int] = set()  # pids of those that have a job
        self._standby: Holder | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @property
    def working(self) -> list[int]:
        """The pids of the processes that have a job."""
        return sorted(self._working.copy())

    @contextmanager
    def worker(self, job: Job) -> Iterator[Holder]:
        """Provide a worker's first process for this job; no process of the worker is left at the end.

        Raises:
            OSError: it cannot be started.
        """
        holder = self._start(job)
        try:
            yield holder
        finally:
            try:
                holder.end()
            finally:
                self._forget(holder)

    def stand_by(self) -> None:
        """Start a spare process for the next job, if there is none."""
        station = self._station
        with self._lock:
            if self._standby is None and not station.over and station.control.state is not RunState.KILLED:
                try:
                    self._standby = self._new(idle=True, ahead=AHEAD)
                except OSError as error:  # this may succeed for the next job
                    logger.warning("no worker stands by: %s", error)

    def stand_down(self) -> None:
        """End the spare process."""
        with self._lock:
            self._dismiss()

    def _start(self, job: Job) -> Holder:
        """Return the spare process if it suits the job, otherwise a new one."""
        task, plain = job.work.command is None, not job.work.env
        with self._lock:
            # The spare process has imported libraries, which may have read variables; and it runs at idle priority,
            # which is too low for watching a command.
            holder = None
            if task and plain and self._standby is not None:
                if self._standby.alive:
                    holder, self._standby = self._standby, None
                else:
                    self._dismiss()
            holder = holder or self._new(idle=task)
            self._working.add(holder.pid)
            return holder

    def _forget(self, holder: Holder) -> None:
        """End processes of the worker that left its process group and are now children of this one."""
        with self._lock:
            self._working.discard(holder.pid)
            OWN.discard(holder.pid)
            reap.end_descendants()

    def _dismiss(self) -> None:
        if self._standby is not None:
            self._standby.end()
            OWN.discard(self._standby.pid)
            self._standby = None

    def _new(self, *, idle: bool, ahead: Sequence[str] = ()) -> Holder:
        spec, fds = self._station.spec, self._station.worker_fds
        started_with = environment(os.environ, {}, spec.user, Path("/"))
        name = f"{os.getpid()}-{next(self._numbers)}"
        holder = Holder(name, fds, started_with, spec.run_dir, idle=idle, ahead=ahead)
        OWN.add(holder.pid)
        return holder
