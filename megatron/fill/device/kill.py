"""Ending all of a worker's processes, whatever they do."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from megatron.fill.device.tree import Process, WorkerTree, children, read_process

_LOOK_S = 0.005


def end_all(
    tree: WorkerTree, budget_s: float, at_once: Callable[[], None] = lambda: None, more: Callable[[], list[int]] = list
) -> bool:
    """Stop, then end, everything in ``tree``; whether it is all gone.

    All are stopped before the first is ended: what is stopped forks no more, so that even a fork bomb is a finite set.

    Args:
        budget_s: give up after this long (a process that is asleep in a driver cannot be ended by anyone).
        at_once: ends what it can in one go (``cgroup.kill``).
        more: pids of further processes of the worker.
    """
    end_s = time.monotonic() + budget_s
    empty = 0
    while True:
        at_once()
        processes = _stop_all(tree, end_s, more)
        _reap(tree)
        # One look may pass over a process that is just moving from a dying parent to us.
        empty = 0 if processes else empty + 1
        if empty == 2:
            return True
        for group in tree.groups(processes):
            _signal(os.killpg, group, signal.SIGKILL)
        for process in processes:
            _signal(os.kill, process.pid, signal.SIGKILL)
        if time.monotonic() > end_s:
            return not tree.look()
        time.sleep(_LOOK_S)


def _stop_all(tree: WorkerTree, end_s: float, more: Callable[[], list[int]]) -> list[Process]:
    """Stop until a look finds nobody new; returns the processes."""
    stopped: set[tuple[int, int]] = set()
    while True:
        processes = tree.look(more())
        new = [process for process in processes if (process.pid, process.started) not in stopped]
        if not new or time.monotonic() > end_s:
            return processes
        for group in tree.groups(new):  # one call stops a whole group, while it forks
            _signal(os.killpg, group, signal.SIGSTOP)
        for process in new:
            _signal(os.kill, process.pid, signal.SIGSTOP)
            stopped.add((process.pid, process.started))


def _reap(tree: WorkerTree) -> None:
    """Take the dead that came to us off the kernel's hands; a worker itself is left to who started it."""
    for child in children(os.getpid()):
        process = read_process(child)
        # What this process starts for itself is in its own group, and a living worker's number is known.
        if process is not None and process.state == "Z" and process.group != os.getpgrp() and child not in tree.roots:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def _signal(send: Callable[[int, int], None], target: int, number: signal.Signals) -> None:
    assert target > 1
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(target, number)
