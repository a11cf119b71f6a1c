"""The processes of a worker, found in /proc: its first process and all descendants of it.

A child whose parent dies goes to the nearest ancestor that is a subreaper: the worker itself, and after its death the
agent.  So a process that double-forks or starts its own session stays a descendant, and is found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.fill.linux.proc import names_in, read, stat_fields

MARK = "PIPEFILL_WORKER"  # environment variable of all processes of a worker
# Workers that this process started, and their holders: they are not orphans, since their starter waits for them.
OWN: set[int] = set()
_PARENT, _GROUP, _THREADS, _STARTED = 3, 4, 19, 21  # indices into ``stat_fields``
_BUSY = slice(13, 17)  # own time in user mode and in the kernel, and that of reaped children
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """A process at one moment."""

    pid: int
    parent: int
    group: int
    state: str  # state letter of proc_pid_stat(5)
    threads: int
    started: int  # start time in ticks since boot; with the pid it identifies a process uniquely
    busy_ticks: int  # CPU time in ticks, with that of reaped children

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def read_process(pid: int, proc: str = "/proc") -> Process | None:
    """The process with this pid; None if there is none."""
    fields = stat_fields(f"{proc}/{pid}/stat")
    if not fields:
        return None
    state = fields[2].decode()
    parent, group, threads, started = (int(fields[at]) for at in (_PARENT, _GROUP, _THREADS, _STARTED))
    return Process(pid, parent, group, state, threads, started, sum(map(int, fields[_BUSY])))


def children(pid: int, proc: str = "/proc") -> list[int]:
    """The children of all threads of a process."""
    threads = names_in(f"{proc}/{pid}/task")
    return [int(child) for thread in threads for child in read(f"{proc}/{pid}/task/{thread}/children").split()]


def descendants(pid: int, without: Iterable[int] = (), proc: str = "/proc") -> list[int]:
    """Every process below ``pid``, parents before children; none of ``without``, and nothing below those."""
    found: list[int] = []
    pending, seen = children(pid, proc), {pid, *without}
    while pending:
        child = pending.pop()
        if child not in seen:  # a pid may be reused during the search
            seen.add(child)
            found.append(child)
            pending += children(child, proc)
    return found


def marked(pid: int, mark: str, proc: str = "/proc") -> bool:
    return f"{MARK}={mark}".encode() in read(f"{proc}/{pid}/environ").split(b"\0")


class WorkerTree:
    """The processes of a worker, orphans included: below its first one, or with its ``mark`` in the environment.

    ``holder`` is the parent that set up the sandbox and ends with the worker; it is excluded from the tree.
    """

    def __init__(self, pid: int, mark: str, holder: int | None = None) -> None:
        self.pid = pid
        self.mark = mark
        self.zombies = 0  # processes dead but not reaped, as of the latest look; each still takes a pid
        self._own = {pid} if holder is None else {pid, holder}
        self._added = self._own - OWN
        OWN.update(self._added)
        self._seen: dict[int, int] = {}  # pid: start time
        self.look()

    def look(self, more: list[int] | None = None) -> list[Process]:
        """Find the living processes of the worker; ``more`` are pids that are known to be its processes' too."""
        worker = read_process(self.pid)
        if worker is not None and self._seen.setdefault(self.pid, worker.started) == worker.started and worker.alive:
            found = [self.pid, *descendants(self.pid)]
        else:
            found = self._orphans()
        alive, self.zombies = [], 0
        for pid in dict.fromkeys([*found, *(more or []), *self._seen]):
            process = read_process(pid)
            if process is None or self._seen.setdefault(pid, process.started) != process.started:
                self._seen.pop(pid, None)  # gone, and its pid possibly reused
            elif process.alive:
                alive.append(process)
            elif pid != self.pid:
                self.zombies += 1
        return alive

    def groups(self, processes: list[Process]) -> set[int]:
        """The process groups of ``processes`` that a process of the worker leads.

        A process may join any group of its session, even the training's, and that group must never get a signal.
        """
        return {process.group for process in processes if process.group in self._seen}

    def _orphans(self) -> list[int]:
        """The pids of the worker's processes that this process, the agent, adopted when the worker died."""
        ours = []
        for child in children(os.getpid()):
            process = read_process(child)
            if process is None or child in self._own:
                continue
            if child in self._seen or process.group in self._seen or marked(child, self.mark):
                ours += [child, *descendants(child)]
        return ours

    def forget(self) -> None:
        """Forget the worker's pids: it was reaped, and they may be reused."""
        OWN.difference_update(self._added)
