"""Faults from outside: in workers, agents, store, clocks and disk."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import marks, processes
from tests.chaos.clock import JumpingClock
from tests.chaos.deed import Deed
from tests.chaos.disk import SmallDisk

_FULL_S, _JUMP_S = 2.0, 2.0
_HOUR_S = 3600.0
_READY_S = 40.0  # longest wait until a victim runs
_LOOK_S = 0.02
_PARTS = ("", "-wal", "-shm")  # of an SQLite database


@dataclass(frozen=True, slots=True)
class Spans:
    """Durations of faults.

    Attributes:
        outage_s: time for which the store is out of reach.
        stop_s: time for which a worker stays stopped; also the longest wait until it is.
        back_s: longest wait until a worker is dead or an agent is back.
    """

    outage_s: float = 3.0
    stop_s: float = 1.0
    back_s: float = 15.0


class Injector:
    """Injects the faults.

    Args:
        database: the job store's file.
        tick: called while waiting; keeps a training running.
    """

    def __init__(
        self, clock: JumpingClock, disk: SmallDisk, database: Path, tick: Callable[[], None], spans: Spans = Spans()
    ) -> None:
        self.clock = clock
        self.disk = disk
        self.database = database
        self.tick = tick
        self.spans = spans
        self._turn = 0

    def commit(self, kind: str, run_dir: Path) -> Deed | None:
        """Commit a fault of a kind that hits no job in particular; return None if it was not seen to happen."""
        actions: dict[str, Callable[[str, Path], Deed | None]] = {
            "agent-kill": self._kill_agent,
            "agent-stop": self._stop_agent,
            "store-locked": lambda name, _: self._during(name, self._locked_store(), self.spans.outage_s),
            "store-away": lambda name, _: self._during(name, self.store_away(), self.spans.outage_s),
            "clock-forward": lambda name, folder: self._jump(name, folder, _HOUR_S),
            "clock-back": lambda name, folder: self._jump(name, folder, -_HOUR_S),
            "disk-full": lambda name, _: self._during(name, self._full_disk(), _FULL_S),
        }
        return actions[kind](kind, run_dir)

    def hit(self, kind: str, notes: Path, tops: Callable[[], Iterable[int]]) -> Deed | None:
        """Kill the honest worker that writes its marks to ``notes``, or stop it for a second.

        Args:
            tops: returns pids of which one is an ancestor of the worker.
        """
        if not self.until(lambda: bool(marks.read(notes, marks.Note.READY)), _READY_S):
            return None
        ready = marks.read(notes, marks.Note.READY)[-1]
        pid = processes.worker_of(ready.pid, ready.folder, tops())
        if pid is None:
            return None
        start_ns = time.monotonic_ns()
        if kind == "sigkill-outside":
            if not processes.send(pid, signal.SIGKILL) or not self.until(
                lambda: not processes.alive(pid), self.spans.back_s
            ):
                return None
        else:
            if not processes.send(pid, signal.SIGSTOP) or not self.until(
                lambda: processes.state(pid) == "T", self.spans.stop_s
            ):
                return None
            self.until(lambda: False, self.spans.stop_s)
            processes.send(pid, signal.SIGCONT)
        return Deed(kind, start_ns, time.monotonic_ns())

    def _kill_agent(self, kind: str, run_dir: Path) -> Deed | None:
        rank, pid = self._next_agent(run_dir)
        if pid is None or not processes.send(pid, signal.SIGKILL):
            return None
        start_ns = time.monotonic_ns()
        back = self.until(lambda: processes.agents(run_dir).get(rank, pid) != pid, self.spans.back_s)
        return Deed(kind, start_ns, time.monotonic_ns(), rank) if back else None

    def _stop_agent(self, kind: str, run_dir: Path) -> Deed | None:
        rank, pid = self._next_agent(run_dir)
        if pid is None or not processes.send(pid, signal.SIGSTOP):
            return None
        start_ns = time.monotonic_ns()
        stopped = self.until(lambda: processes.state(pid) == "T", self.spans.stop_s)
        continued = self.until(lambda: processes.state(pid) != "T", self.spans.back_s)
        processes.send(pid, signal.SIGCONT)
        return Deed(kind, start_ns, time.monotonic_ns(), rank) if stopped and continued else None

    def _next_agent(self, run_dir: Path) -> tuple[int, int | None]:
        """The next rank in turn, and the pid of its agent."""
        agents = processes.agents(run_dir)
        self._turn += 1
        rank = sorted(agents)[self._turn % len(agents)] if agents else 0
        return rank, agents.get(rank)

    def _jump(self, kind: str, run_dir: Path, seconds: float) -> Deed | None:
        pids = processes.agents(run_dir).values()
        if not pids or not all(map(self.clock.moves, pids)):
            return None
        start_ns = time.monotonic_ns()
        try:
            self.clock.jump(seconds)
            self.until(lambda: False, _JUMP_S)
        finally:
            self.clock.jump(0.0)
        return Deed(kind, start_ns, time.monotonic_ns())

    def _during(self, kind: str, fault: contextlib.AbstractContextManager[bool], seconds: float) -> Deed | None:
        start_ns = time.monotonic_ns()
        with fault as happened:
            # No tick: it would need the store itself.
            time.sleep(seconds if happened else 0.0)
        return Deed(kind, start_ns, time.monotonic_ns()) if happened else None

    @contextlib.contextmanager
    def _locked_store(self) -> Iterator[bool]:
        connection = sqlite3.connect(self.database, timeout=10.0, isolation_level=None)
        try:
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute("BEGIN EXCLUSIVE")
            yield connection.in_transaction
        finally:
            connection.close()

    @contextlib.contextmanager
    def store_away(self) -> Iterator[bool]:
        """Move the store's files into the folder ``away`` next to it, and back at the end."""
        away = self.database.parent / "away"
        away.mkdir(exist_ok=True)
        files = [self.database.with_name(self.database.name + part) for part in _PARTS]
        moved = [file for file in files if file.exists()]
        for file in moved:
            os.replace(file, away / file.name)
        try:
            yield True
        finally:
            for file in files:  # files created in the meantime
                file.unlink(missing_ok=True)
            for file in moved:
                os.replace(away / file.name, file)

    @contextlib.contextmanager
    def _full_disk(self) -> Iterator[bool]:
        try:
            yield self.disk.fill()
        finally:
            self.disk.free()

    def until(self, done: Callable[[], bool], within_s: float) -> bool:
        """Wait until ``done()``, at most ``within_s``; return True if it became true."""
        end_s = time.monotonic() + within_s
        while not done():
            if time.monotonic() >= end_s:
                return False
            self.tick()
            time.sleep(_LOOK_S)
        return True
