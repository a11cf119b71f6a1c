"""Rows of a pass in groups of similar size: a batch is padded to its longest row, and another batch costs weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.fill.wings.llm.attention import text_config

# In multiplications of a weight and a token: a layer's kernels, reading a weight, and a number of what is kept.  On the
# CPU fitted to passes of four models of 0.2 to 40 million weights on one core; for GPUs from their data sheets.
_COSTS = {"cpu": (1e7, 10.0, 24.0), "cuda": (1e10, 150.0, 400.0)}


@dataclass(frozen=True, slots=True)
class PassCost:
    """The cost of a batch, in multiplications of a weight and a token."""

    batch: float  # fixed cost: weights are read, and every kernel is started
    token: float  # cost of each of its tokens, padding included
    column: float  # cost of each column that a token attends to, padding included
    copied: float  # cost of each column of a row, padding included: its keys and values are read

    def of(self, rows: np.ndarray, queries: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """The costs of batches of so many rows, padded to so many queries and columns."""
        return self.batch + rows * (columns * self.copied + queries * (self.token + columns * self.column))


def pass_cost(model: Any, kept: int) -> PassCost:
    """The cost of a model's batches on its device.

    Args:
        kept: numbers that all layers keep of a token.
    """
    layer, weight, number = _COSTS[model.device.type]
    config = text_config(model)
    given, gives = model.get_input_embeddings(), model.get_output_embeddings()
    size = sum(parameter.numel() for parameter in model.parameters())
    if gives is not None and gives.weight is not given.weight:
        size -= given.weight.numel()  # a row of it is read for a token
    shared = getattr(config, "num_attention_heads", 1) / (getattr(config, "num_key_value_heads", None) or 1)
    return PassCost(layer * config.num_hidden_layers + weight * size, size, shared * kept, number * kept)


def grouped(queries: Sequence[int], columns: Sequence[int], cost: PassCost, room: int) -> list[list[int]]:
    """The rows of each batch, so that all of them together cost least.

    A batch has rows that are neighbours when they are sorted, by columns or by queries; the better order is taken.

    Args:
        queries, columns: number of each row's queries and columns.
        room: the most columns that a batch may have, padding included; each row alone fits.
    """
    sizes = np.array([queries, columns])
    count = len(queries)
    together = cost.of(np.array(count), *sizes.max(1))
    apart = cost.of(np.array(1), *sizes).sum()
    fits = count * sizes[1].max() <= room
    if fits and together <= apart - (count - 2) * cost.batch:  # two batches without any padding
        return [list(range(count))]
    found = [_split(np.lexsort(keys), sizes[0], sizes[1], cost, room) for keys in (sizes, sizes[::-1])]
    best = min(found, key=lambda one: one[0])
    if fits and best[0] >= together:
        return [list(range(count))]
    return best[1]


def _split(
    order: np.ndarray, queries: np.ndarray, columns: np.ndarray, cost: PassCost, room: int
) -> tuple[float, list[list[int]]]:
    """The least cost of batches of neighbours in this order, and their rows in the order given."""
    count, (queries, columns) = len(order), (queries[order], columns[order])
    least, begins = np.zeros(count + 1), [0] * (count + 1)
    for end in range(1, count + 1):
        longest = [np.maximum.accumulate(one[:end][::-1])[::-1] for one in (queries, columns)]  # by first row
        rows = np.arange(end, 0, -1)
        costs = np.where(rows * longest[1] <= room, least[:end] + cost.of(rows, *longest), np.inf)
        begins[end] = int(np.argmin(costs))
        least[end] = costs[begins[end]]
    groups, end = [], count
    while end:
        groups.append(sorted(order[begins[end] : end].tolist()))
        end = begins[end]
    return float(least[count]), groups
