"""Ends what is below this process: all of one worker, or whatever came here from a child that died.

One rule for both: what this process started for itself is not an orphan.  That is what stays in its process group (a
control program that it asks something, say), and what is in ``tree.OWN`` (workers and who holds them).  To adopt
orphans at all, it calls ``host.adopt_orphans``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from megatron.fill.linux.tree import OWN, Process, WorkerTree, children, descendants, read_process

_WITHIN_S = 5.0
_LOOK_S = 0.005


def end_all(
    tree: WorkerTree, budget_s: float, at_once: Callable[[], None] = lambda: None, more: Callable[[], list[int]] = list
) -> bool:
    """Stop, then end, everything in ``tree``; whether it is all gone.

    Args:
        budget_s: give up after this long (a process that is asleep in a driver cannot be ended by anyone).
        at_once: ends what it can in one go (``cgroup.kill``).
        more: pids of further processes of the worker.
    """
    return _end(lambda: tree.look(more()), tree.groups, budget_s, at_once)


def end_descendants() -> None:
    """End and collect all orphans that came to this process, however they fork."""
    # They may have joined any group of the session, so none of their groups gets a signal.
    _end(_orphans, lambda processes: set(), _WITHIN_S, lambda: None)


def _end(
    look: Callable[[], list[Process]],
    groups: Callable[[list[Process]], set[int]],
    budget_s: float,
    at_once: Callable[[], None],
) -> bool:
    """All are stopped before the first is ended: what is stopped forks no more, so even a fork bomb is a finite set.

    Args:
        look: the living processes to end, as they are now.
        groups: the process groups among these that are theirs alone.
    """
    end_s = time.monotonic() + budget_s
    empty = 0
    while True:
        at_once()
        processes = _stop_all(look, groups, end_s)
        _collect()
        # One look may pass over a process that is just moving from a dying parent to us.
        empty = 0 if processes else empty + 1
        if empty == 2:
            return True
        for group in groups(processes):
            _signal(os.killpg, group, signal.SIGKILL)
        for process in processes:
            _signal(os.kill, process.pid, signal.SIGKILL)
        if time.monotonic() > end_s:
            return not look()
        time.sleep(_LOOK_S)


def _stop_all(
    look: Callable[[], list[Process]], groups: Callable[[list[Process]], set[int]], end_s: float
) -> list[Process]:
    """Stop until a look finds nobody new; returns the processes."""
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
    """What came here, and all that is below it."""
    came = [child for child in children(os.getpid()) if _came(read_process(child))]
    found = [read_process(pid) for child in came for pid in (child, *descendants(child))]
    return [process for process in found if process is not None and process.alive]


def _collect() -> None:
    """Take the dead that came to us off the kernel's hands."""
    for child in children(os.getpid()):
        process = read_process(child)
        if _came(process) and process is not None and not process.alive:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def _came(child: Process | None) -> bool:
    """Whether a child is an orphan that this process adopted."""
    return child is not None and child.pid not in OWN and child.group != os.getpgrp()


def _signal(send: Callable[[int, int], None], target: int, number: signal.Signals) -> None:
    assert target > 1
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(target, number)
