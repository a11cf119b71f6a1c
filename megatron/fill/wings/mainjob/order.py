"""The schedule of a training, by its name or from a file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from megatron.fill.errors import ConfigError
from megatron.fill.pipeline.schedule import Schedule
from megatron.fill.pipeline.schedules import V_SHAPED, make_schedule
from megatron.fill.pipeline.torch_csv import load_csv

MOST_PASSES = 200_000  # of a replica: a timeline of as many takes ten seconds, and 350 MiB


def order_of(name: str, stages: int, microbatches: int, chunks: int = 1, group_size: int | None = None) -> Schedule:
    """Return a schedule with these counts.

    Args:
        name: name that ``pipeline.schedules.make_schedule`` knows, or the absolute path of a file in torch's form.
        group_size: group size of an interleaved schedule by name; a file has its own order.

    Raises:
        ConfigError: the file is not a schedule, or one with other counts.
        ValueError: the name is unknown, the schedule does not accept an argument, or it has more than ``MOST_PASSES``.
    """
    path = Path(name)
    if not path.is_absolute():
        passes = 2 * microbatches * stages * chunks
        if passes > MOST_PASSES:
            each = "two for each microbatch and virtual stage"
            raise ValueError(f"a replica has {passes:,} passes, {each}; expected at most {MOST_PASSES:,}")
        return make_schedule(name, stages, microbatches, chunks, group_size)
    schedule = load_csv(path)
    for what, there, wanted in (
        ("ranks", schedule.stages, stages),
        ("microbatches", schedule.microbatches, microbatches),
        ("stages per rank", schedule.chunks, chunks),
    ):
        if there != wanted:
            raise ConfigError(f"{path}: it has {there} {what}: expected {wanted}, as the training has")
    return schedule


@lru_cache(maxsize=1024)  # a search asks for all counts of stages, microbatches and chunks that it weighs
def placement_of(name: str, stages: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each virtual stage, along the model, of a schedule with these counts.

    Raises:
        ConfigError: as for ``order_of``.
        ValueError: the schedule does not accept an argument.
    """
    if Path(name).is_absolute() or name in V_SHAPED:
        return order_of(name, stages, microbatches, chunks).placement
    return tuple(range(stages)) * chunks


@lru_cache(maxsize=1024)
def held_by(name: str, stages: int, microbatches: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the virtual stages of each rank, in order; arguments and errors as for ``placement_of``."""
    held: list[list[int]] = [[] for _ in range(stages)]
    for virtual, rank in enumerate(placement_of(name, stages, microbatches, chunks)):
        held[rank].append(virtual)
    return tuple(map(tuple, held))
