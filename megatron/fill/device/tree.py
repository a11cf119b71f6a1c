"""The processes of one worker, found in /proc: what it forked, and what these forked.

A child whose parent dies goes to the nearest ancestor that is a subreaper: the worker itself, and after its death the
agent.  So whatever double-forks or starts a session of its own stays a descendant, and is found.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

MARK = "PIPEFILL_WORKER"  # in the environment of all that a worker starts
_READ_BYTES = 1 << 16
_PARENT, _GROUP, _THREADS, _STARTED = 3, 4, 19, 21  # fields of /proc/PID/stat, counted from 0, see proc(5)


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment.

    Attributes:
        started: when, in the kernel's ticks since boot: with the pid it names a process for good.
    """

    pid: int
    parent: int
    group: int
    state: str
    threads: int
    started: int

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def read_process(pid: int, proc: str = "/proc") -> Process | None:
    """The process; None if there is none of that number."""
    text = _read(f"{proc}/{pid}/stat")
    if not text:
        return None
    # The name, in parentheses, may hold anything, spaces and parentheses too.
    fields = [b"", b"", *text[text.rindex(b")") + 1 :].split()]
    state = fields[2].decode()
    return Process(pid, int(fields[_PARENT]), int(fields[_GROUP]), state, int(fields[_THREADS]), int(fields[_STARTED]))


def children(pid: int, proc: str = "/proc") -> list[int]:
    """The children of all threads of a process."""
    try:
        threads = os.listdir(f"{proc}/{pid}/task")
    except OSError:
        return []
    return [int(child) for thread in threads for child in _read(f"{proc}/{pid}/task/{thread}/children").split()]


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
    return f"{MARK}={mark}".encode() in _read(f"{proc}/{pid}/environ").split(b"\0")


def private_bytes(pid: int, proc: str = "/proc") -> int:
    """What a process holds that is not a file's: anonymous and shared memory, resident or swapped out.

    Pages that it shares with its parent since a fork are counted in both.
    """
    return _sum_kib(f"{proc}/{pid}/status", (b"RssAnon:", b"RssShmem:", b"VmSwap:"))


def proportional_bytes(pid: int, proc: str = "/proc") -> int | None:
    """The same with every shared page counted once over all who share it.  Slow: it walks the page tables.

    None where the kernel does not say.
    """
    return _sum_kib(f"{proc}/{pid}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")) or None


def _sum_kib(path: str, names: tuple[bytes, ...]) -> int:
    return sum(int(line.split()[1]) for line in _read(path).splitlines() if line.startswith(names)) * 1024


def _read(path: str) -> bytes:
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
        roots: the workers of all trees of this process, and their holders: never to be reaped by one that did not
            start them.
        zombies: dead and not reaped, as of the latest look: each still takes a pid.
    """

    roots: ClassVar[set[int]] = set()

    def __init__(self, pid: int, mark: str, holder: int | None = None) -> None:
        self.pid = pid
        self.mark = mark
        self.zombies = 0
        self._own = {pid} if holder is None else {pid, holder}
        self.roots.update(self._own)
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
        self.roots.difference_update(self._own)
