"""Keys and values of several sequences, a slot for each, in one tensor per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from megatron.fill.errors import TaskError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer keeps of a token.

    Attributes:
        heads: of keys and values; fewer than the queries' with grouped-query attention.
        key_size, value_size: of one head.
    """

    heads: int
    key_size: int
    value_size: int


class SlotCache:
    """Keys and values, ``[slots, heads, capacity + 1, size]`` per layer; padding writes to the last column.

    Args:
        shapes: of each layer (``probe_shapes``).

    Attributes:
        slots: how many sequences there is room for.
        capacity: tokens that each slot has room for.
    """

    def __init__(self, shapes: Sequence[LayerShape], dtype: torch.dtype, device: str) -> None:
        self._shapes, self._dtype, self._device = tuple(shapes), dtype, device
        self._keys = [self._empty(shape.heads, 0, 0, shape.key_size) for shape in self._shapes]
        self._values = [self._empty(shape.heads, 0, 0, shape.value_size) for shape in self._shapes]
        self.slots = self.capacity = 0

    @property
    def token_bytes(self) -> int:
        """What a token takes in all layers."""
        return sum(shape.heads * (shape.key_size + shape.value_size) for shape in self._shapes) * self._dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """What the tensors take now."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def bytes_for(self, slots: int, capacity: int) -> int:
        """The most that is held with this room, or while it becomes this one or a smaller one: a layer twice."""
        layers = len(self._shapes)
        return -(-self.token_bytes * slots * (capacity + 1) * (layers + 1) // layers)

    def resize(self, slots: int, capacity: int) -> int:
        """Change the room; what fits into it of the first slots is kept.  One layer after the other is copied.

        Returns:
            The most bytes that were held meanwhile.
        """
        if (slots, capacity) == (self.slots, self.capacity):
            return self.held_bytes
        kept, columns, most = min(slots, self.slots), min(capacity, self.capacity), self.held_bytes
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                new = self._empty(old.shape[1], slots, capacity + 1 if slots else 0, old.shape[3])
                most = max(most, self.held_bytes + new.nbytes)
                new[:kept, :, :columns] = old[:kept, :, :columns]
                tensors[layer] = new
        self.slots, self.capacity = slots, capacity
        return max(most, self.held_bytes)

    def move(self, source: int, target: int, columns: int) -> None:
        """Copy the first columns of a slot to another slot."""
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :columns] = tensor[source, :, :columns]

    def wipe(self, slot: int, first: int) -> None:
        """Set a slot's columns from the first one on to zero."""
        for tensor in (*self._keys, *self._values):
            tensor[slot, :, first:] = 0

    def compact(self, slots: Sequence[int], sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
        """Copy columns of slots to other columns of the same slots; all are read before any is written."""
        rows = [slot for slot, columns in zip(slots, sources, strict=True) for _ in columns]
        if not rows:
            return
        at = torch.tensor(rows, device=self._device)
        read = torch.tensor([column for columns in sources for column in columns], device=self._device)
        written = torch.tensor([column for columns in targets for column in columns], device=self._device)
        for tensor in (*self._keys, *self._values):
            tensor[at, :, written] = tensor[at, :, read]

    def _empty(self, heads: int, slots: int, columns: int, size: int) -> torch.Tensor:
        # What is masked is multiplied by 0, and memory may hold NaN.  Written, so that it is held from now on.
        return torch.empty(slots, heads, columns, size, dtype=self._dtype, device=self._device).zero_()


class CacheView(Cache):
    """What one forward pass sees of a ``SlotCache``.

    Args:
        rows: the slot of each row of the batch.
        columns: where each new token is kept, ``[rows, queries]``.
        length: columns that the pass looks at.
    """

    def __init__(self, cache: SlotCache, rows: list[int], columns: torch.Tensor, length: int) -> None:
        super().__init__(layers=[])
        self._cache, self._columns, self._length = cache, columns, length
        self._leading = rows == list(range(len(rows)))
        self._rows = torch.tensor(rows, device=columns.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new keys and values, ``[rows, heads, queries, size]``; all that the pass looks at."""
        keys, values = self._cache._keys[layer_idx], self._cache._values[layer_idx]
        at = self._rows[:, None]
        keys[at, :, self._columns] = key_states.transpose(1, 2)
        values[at, :, self._columns] = value_states.transpose(1, 2)
        if self._leading:
            return keys[: len(self._rows), :, : self._length], values[: len(self._rows), :, : self._length]
        return keys[self._rows, :, : self._length], values[self._rows, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length - self._columns.shape[1]


class _Probe(Cache):
    """Notes what a pass would keep."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def probe_shapes(model: Any, kinds: Sequence[str]) -> list[LayerShape]:
    """What each layer of a ``transformers`` model keeps of a token, by a pass over one token.

    Args:
        kinds: of attention that its layers have; with several, each has a mask of its own.

    Raises:
        TaskError: the layers do not all keep keys and values.
    """
    probe = _Probe()
    device, dtype = model.device, model.dtype
    mask = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
    with torch.inference_mode():
        model.base_model(
            input_ids=torch.zeros(1, 1, dtype=torch.long, device=device),
            position_ids=torch.zeros(1, 1, dtype=torch.long, device=device),
            attention_mask=dict.fromkeys(kinds, mask) if len(kinds) > 1 else mask,
            past_key_values=probe,
            use_cache=True,
        )
    if sorted(probe.shapes) != list(range(len(probe.shapes))) or not probe.shapes:
        kept = f"layers {sorted(probe.shapes)}" if probe.shapes else "no layer"
        raise TaskError(f"{type(model).__name__} keeps keys and values in {kept}; expected in each of its layers")
    return [probe.shapes[layer] for layer in sorted(probe.shapes)]
