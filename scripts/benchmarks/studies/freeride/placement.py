"""Placement of side tasks on workers: FreeRide's Algorithm 1 as in its artifact (scheduler_v1.py, ``AddTask``)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.fill.wings.mainjob.hardware import GIB


def needed_gib(memory_bytes: int) -> int:
    """Memory that a task requests, in GiB: its own, rounded up."""
    return -(-memory_bytes // GIB)


def fits(need_gib: int, free_gib: int) -> bool:
    """True if a worker has enough memory: more than the task requests."""
    return free_gib > need_gib


def place(needs_gib: Sequence[int], free_gib: Sequence[int]) -> list[int | None]:
    """Assign each task to the worker with the fewest tasks among those with enough memory; the first one on ties.

    Args:
        needs_gib: requested memory of the tasks, in the order of submission.
        free_gib: free memory of the workers.

    Returns:
        The worker of each task; None for a task that fits no worker.
    """
    tasks = [0] * len(free_gib)
    placed: list[int | None] = []
    for need in needs_gib:
        able = [worker for worker, free in enumerate(free_gib) if fits(need, free)]
        worker = min(able, key=tasks.__getitem__, default=None)
        if worker is not None:
            tasks[worker] += 1
        placed.append(worker)
    return placed


def served(placed: Sequence[int | None], workers: int) -> list[int | None]:
    """Return the task that each worker runs: the first one assigned, since others must wait until it has finished.

    Returns:
        The task's place in the order of submission; None for a worker without a task.
    """
    return [placed.index(worker) if worker in placed else None for worker in range(workers)]
