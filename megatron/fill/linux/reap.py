"""Killing of descendants: of a worker, of all orphans that this process adopted from dead children, or of another.

A process that this process started for its own use is not an orphan: it stays in this process's group (a control
program, say) or is in ``tree.OWN`` (workers and their holders).  Adopting orphans requires ``host.adopt_orphans``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

from megatron.fill.linux.tree import OWN, Process, WorkerTree, children, descendants, read_process

_WITHIN_S = 5.0
_LOOK_S = 0.005


def end_all(
    tree: WorkerTree, budget_s: float, at_once: Callable[[], None] = lambda: None, more: Callable[[], list[int]] = list
) -> bool:
    """Stop, then kill, all processes in ``tree``; return True if all are gone.

    Args:
        budget_s: time after which it gives up (a process asleep in a driver cannot be killed).
        at_once: kills all processes that it can with one call (``cgroup.kill``).
        more: returns pids of further processes of the worker.
    """
    return _end(lambda: tree.look(more()), budget_s, _collect, tree.groups, at_once)


def end_descendants() -> None:
    """Kill and reap all orphans that this process adopted, however they fork."""
    # They may have joined any process group of the session, so no group gets a signal.
    _end(_orphans, _WITHIN_S, _collect)


def end_below(pid: int, budget_s: float) -> bool:
    """Stop, then kill, all processes below another, which is stopped and adopts orphans; True if all are gone."""
    dead: set[int] = set()  # children of it: nobody reaps them, so no other process gets their pids

    def collect() -> bool:
        died = {child.pid for child in _read(set(children(pid)) - dead) if not child.alive}
        dead.update(died)
        return bool(died)

    return _end(lambda: _alive(descendants(pid, dead)), budget_s, collect)


def _end(
    look: Callable[[], list[Process]],
    budget_s: float,
    collect: Callable[[], bool],
    groups: Callable[[list[Process]], set[int]] = lambda processes: set(),
    at_once: Callable[[], None] = lambda: None,
) -> bool:
    """Stop all living processes, then kill them: a stopped one does not fork, so even a fork bomb is a finite set.

    ``collect`` reaps those that have died, and returns True if any had; ``groups`` returns those of the processes'
    groups that hold no other process.
    """
    end_s = time.monotonic() + budget_s
    empty = 0
    while True:
        at_once()
        processes = _stop_all(look, groups, end_s)
        # A look misses a chain whose processes each fork the next and end: the one that it lists has ended when it is
        # read, and the next was not there.  As long as a chain goes on, more have died at each look.
        empty = 0 if collect() or processes else empty + 1
        if empty == 2:
            return True
        for group in groups(processes):
            _signal(os.killpg, group, signal.SIGKILL)
        for process in processes:
            _signal(os.kill, process.pid, signal.SIGKILL)
        if time.monotonic() > end_s:
            return not (look() or collect())
        time.sleep(_LOOK_S)


def _stop_all(
    look: Callable[[], list[Process]], groups: Callable[[list[Process]], set[int]], end_s: float
) -> list[Process]:
    """Stop processes until a look finds no new one; return all of them."""
    stopped: set[tuple[int, int]] = set()
    while True:
        processes = look()
        new = [process for process in processes if (process.pid, process.started) not in stopped]
        if not new or time.monotonic() > end_s:
            return processes
        for group in groups(new):  # one call stops a whole group, while it forks
            _signal(os.killpg, group, signal.SIGSTOP)
        for process in new:
            _signal(os.kill, process.pid, signal.SIGSTOP)
            stopped.add((process.pid, process.started))


def _orphans() -> list[Process]:
    """The living orphans that this process adopted, and their descendants."""
    return _alive(pid for child in _adopted() for pid in (child.pid, *descendants(child.pid)))


def _read(pids: Iterable[int]) -> list[Process]:
    return list(filter(None, map(read_process, pids)))


def _alive(pids: Iterable[int]) -> list[Process]:
    return [process for process in _read(pids) if process.alive]


def _collect() -> bool:
    """Reap adopted orphans that have died; True if there were any."""
    died = [child.pid for child in _adopted() if not child.alive]
    for pid in died:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return bool(died)


def _adopted() -> list[Process]:
    """The orphans that this process adopted, dead or alive."""
    found = _read(children(os.getpid()))
    return [child for child in found if child.pid not in OWN and child.group != os.getpgrp()]


def _signal(send: Callable[[int, int], None], target: int, number: signal.Signals) -> None:
    assert target > 1
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(target, number)
