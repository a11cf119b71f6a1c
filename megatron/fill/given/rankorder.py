"""The user's rank order: the mapping from Megatron's ranks to those of the launcher.

The file is JSON: ``{"order": [2, 0, 3, 1]}`` makes the process that was started as rank 2 Megatron's rank 0.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_json
from megatron.fill.given.problems import shown


def load_rank_order(path: str | Path, world_size: int) -> tuple[int, ...]:
    """Return the physical rank (the launcher's) of each logical rank (Megatron's).

    ConfigError if the file is invalid, or does not name each of ``world_size`` ranks once.
    """
    expected = f'{{"order": [...]}} with each rank from 0 to {world_size - 1} once'
    data = read_json(path, expected)
    if not isinstance(data, dict) or set(data) != {"order"}:
        raise ConfigError(f"{path}: found {shown(data)}: expected {expected}")
    order = data["order"]
    if not isinstance(order, list) or not all(type(rank) is int for rank in order):
        raise ConfigError(f"{path}: order is {shown(order)}: expected a list of ranks")
    if len(order) != world_size:
        raise ConfigError(f"{path}: order has {len(order)} ranks, but {world_size} were started: expected {expected}")
    twice = [rank for rank, times in Counter(order).items() if times > 1]
    if twice:
        raise ConfigError(f"{path}: order has rank {twice[0]} more than once: expected {expected}")
    beyond = [rank for rank in order if not 0 <= rank < world_size]
    if beyond:
        raise ConfigError(f"{path}: order has rank {beyond[0]}: expected {expected}")
    return tuple(order)
