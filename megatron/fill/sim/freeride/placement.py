"""Which worker gets which side task: FreeRide's Algorithm 1, as its artifact has it (scheduler_v1.py, ``AddTask``)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.fill.mainjob.hardware import GIB


def needed_gib(memory_bytes: int) -> int:
    """What a task asks for: its memory, rounded up."""
    return -(-memory_bytes // GIB)


def fits(need_gib: int, free_gib: int) -> bool:
    """Whether a worker has enough memory: more than the task asks for."""
    return free_gib > need_gib


def place(needs_gib: Sequence[int], free_gib: Sequence[int]) -> list[int | None]:
    """The worker of each task: the first of those with the fewest tasks among those with enough memory.

    Args:
        needs_gib: of the tasks, in the order in which they are submitted.
        free_gib: of the workers.

    Returns:
        None for a task that no worker has the memory for.
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
    """The task that each worker runs: the first that it was given, and no other before that has finished.

    Returns:
        The task's place in the order of submission; None for a worker without any.
    """
    return [placed.index(worker) if worker in placed else None for worker in range(workers)]
