"""The processes of one worker, found in /proc: what it forked, and what these forked.

A child whose parent dies goes to the nearest ancestor that is a subreaper: the worker itself, and after its death the
agent.  So whatever double-forks or starts a session of its own stays a descendant, and is found.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

MARK = "PIPEFILL_WORKER"  # in the environment of all that a worker starts
# The workers that this process started, and who holds them: none is an orphan, and each is waited for by its starter.
OWN: set[int] = set()
_READ_BYTES = 1 << 16
_PARENT, _GROUP, _THREADS, _STARTED = 3, 4, 19, 21  # as ``stat_fields`` counts
_BUSY = slice(13, 17)  # its own time in user mode and in the kernel, and that of its children
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment.

    Attributes:
        started: when, in the kernel's ticks since boot: with the pid it names a process for good.
        busy_ticks: the CPU time that it has had, with its children that have ended and were reaped.
    """

    pid: int
    parent: int
    group: int
    state: str
    threads: int
    started: int
    busy_ticks: int

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def stat_fields(path: str) -> list[bytes]:
    """What such a file of /proc says of a process or a thread, counted from 0 as in proc_pid_stat(5), but for its
    number and its name; empty once it is gone."""
    text = read(path)
    # The name, in parentheses, may hold anything, spaces and parentheses too.
    return [b"", b"", *text[text.rindex(b")") + 1 :].split()] if text else []


def read_process(pid: int, proc: str = "/proc") -> Process | None:
    """The process; None if there is none of that number."""
    fields = stat_fields(f"{proc}/{pid}/stat")
    if not fields:
        return None
    state = fields[2].decode()
    parent, group, threads, started = (int(fields[at]) for at in (_PARENT, _GROUP, _THREADS, _STARTED))
    return Process(pid, parent, group, state, threads, started, sum(map(int, fields[_BUSY])))


def children(pid: int, proc: str = "/proc") -> list[int]:
    """The children of all threads of a process."""
    try:
        threads = os.listdir(f"{proc}/{pid}/task")
    except OSError:
        return []
    return [int(child) for thread in threads for child in read(f"{proc}/{pid}/task/{thread}/children").split()]


def descendants(pid: int, proc: str = "/proc") -> list[int]:
    """Every process below ``pid``, parents before children."""
    found: list[int] = []
    pending, seen = children(pid, proc), {pid}
    while pending:
        child = pending.pop()
        if child not in seen:  # a pid may be used anew while we look
            seen.add(child)
            found.append(child)
            pending += children(child, proc)
    return found


def marked(pid: int, mark: str, proc: str = "/proc") -> bool:
    """Whether the process was started with this mark in its environment."""
    return f"{MARK}={mark}".encode() in read(f"{proc}/{pid}/environ").split(b"\0")


def read(path: str) -> bytes:
    """The whole file; nothing if the process is gone.  A few times quicker than ``Path.read_bytes``."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    parts = []
    try:
        while part := os.read(fd, _READ_BYTES):  # the kernel may give a page at a time
            parts.append(part)
    except OSError:  # it ended meanwhile
        return b""
    finally:
        os.close(fd)
    return b"".join(parts)


class WorkerTree:
    """Keeps track of one worker's processes, the orphans among them too.

    Args:
        pid: the first process of it.
        mark: what its environment has as ``MARK``.
        holder: who put it where it is and ends with it; a child of this process that is none of the tree.

    Attributes:
        zombies: dead and not reaped, as of the latest look: each still takes a pid.
    """

    def __init__(self, pid: int, mark: str, holder: int | None = None) -> None:
        self.pid = pid
        self.mark = mark
        self.zombies = 0
        self._own = {pid} if holder is None else {pid, holder}
        self._added = self._own - OWN
        OWN.update(self._added)
        self._seen: dict[int, int] = {}  # pid: when it started
        self.look()

    def look(self, more: list[int] | None = None) -> list[Process]:
        """The living processes of the worker now; ``more`` are pids known to be its own."""
        worker = read_process(self.pid)
        if worker is not None and self._seen.setdefault(self.pid, worker.started) == worker.started and worker.alive:
            found = [self.pid, *descendants(self.pid)]
        else:
            found = self._orphans()
        alive, self.zombies = [], 0
        for pid in dict.fromkeys([*found, *(more or []), *self._seen]):
            process = read_process(pid)
            if process is None or self._seen.setdefault(pid, process.started) != process.started:
                self._seen.pop(pid, None)  # gone, and its number maybe another's
            elif process.alive:
                alive.append(process)
            elif pid != self.pid:
                self.zombies += 1
        return alive

    def groups(self, processes: list[Process]) -> set[int]:
        """The process groups among these that are the worker's own.

        A process may join any group of its session, the training's too: that group must never get a signal.
        """
        return {process.group for process in processes if process.group in self._seen}

    def _orphans(self) -> list[int]:
        """What came to this process, the agent, when the worker died."""
        ours = []
        for child in children(os.getpid()):
            process = read_process(child)
            if process is None or child in self._own:
                continue
            if child in self._seen or process.group in self._seen or marked(child, self.mark):
                ours += [child, *descendants(child)]
        return ours

    def forget(self) -> None:
        """The worker was reaped; its number may become another process's."""
        OWN.difference_update(self._added)
