"""Keys and values of several sequences, in pages of a few tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from megatron.fill.errors import TaskError

PAGE = 16  # tokens


def pages_for(tokens: int) -> int:
    """Pages that so many tokens need."""
    return -(-tokens // PAGE)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of a token's keys and values in a layer."""

    heads: int  # of keys and values; fewer than query heads with grouped-query attention
    key_size: int  # elements per head
    value_size: int


class PagedCache:
    """Keys and values, ``[heads, 1 + pages, PAGE, size]`` per layer; padding is written to page 0, and never read.

    A table lists the pages of a sequence: column c is in page ``table[c // PAGE]``, at ``c % PAGE``.  Sequences whose
    pages follow each other, at the same distance from sequence to sequence, are read where they are; all others are
    copied for a layer's attention.

    Args:
        shapes: each layer's shape (``probe_shapes``).
    """

    def __init__(self, shapes: Sequence[LayerShape], dtype: torch.dtype, device: str) -> None:
        self._shapes, self._dtype, self._device = tuple(shapes), dtype, device
        self._keys = [self._empty(shape.heads, 0, shape.key_size) for shape in self._shapes]
        self._values = [self._empty(shape.heads, 0, shape.value_size) for shape in self._shapes]
        self._copy = torch.empty(0, dtype=dtype, device=device)
        self.pages = 0  # number of pages; they are numbered from 1

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return sum(shape.heads * (shape.key_size + shape.value_size) for shape in self._shapes) * self._dtype.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes that the tensors take now."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values, self._copy))

    def bytes_for(self, pages: int) -> int:
        """The most that is held with so many pages, or while they become as many: a layer twice."""
        return (pages + 1) * PAGE * (self.token_bytes + self._copied * self._dtype.itemsize) if pages else 0

    def resize(self, pages: int, kept: Mapping[int, int]) -> int:
        """Change the number of pages; one tensor after the other is copied.

        Args:
            kept: pages that there are, and the ones that they become.

        Returns:
            The most bytes that were held meanwhile.
        """
        most = self.held_bytes
        self._copy = torch.empty(0, dtype=self._dtype, device=self._device)
        source, target = (
            torch.tensor(list(one), dtype=torch.long, device=self._device) for one in (kept, kept.values())
        )
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                new = self._empty(len(old), pages + 1 if pages else 0, old.shape[3])
                if kept:
                    copied = old.index_select(1, source)
                    most = max(most, self.held_bytes + new.nbytes + copied.nbytes)
                    new.index_copy_(1, target, copied)
                    del copied
                tensors[layer] = new
        self.pages = pages
        return max(most, self.held_bytes)

    def copy(self, begin: int, numbers: int) -> torch.Tensor:
        """A part of the memory for what one layer's attention reads; there is none before it is asked for."""
        if not self._copy.numel():
            self._copy = torch.empty(
                (self.pages + 1) * PAGE * self._copied, dtype=self._dtype, device=self._device
            ).zero_()
        return self._copy[begin : begin + numbers]

    def wipe(self, table: Sequence[int], first: int = 0) -> None:
        """Set the columns of a sequence to zero, from the first one on."""
        whole, begun = pages_for(first), first % PAGE
        pages = torch.tensor(table[whole:], dtype=torch.long, device=self._device)
        for tensor in (*self._keys, *self._values):
            tensor[:, pages] = 0
            if begun and whole <= len(table):
                tensor[:, table[whole - 1], begun:] = 0

    def compact(self, moves: Sequence[tuple[Sequence[int], int, int]]) -> None:
        """Copy columns of sequences: of a table, from one column to another; all are read before any is written."""
        if not moves:
            return
        places = [(table[old // PAGE], old % PAGE, table[new // PAGE], new % PAGE) for table, old, new in moves]
        page, at, to_page, to = torch.tensor(places, device=self._device).unbind(1)
        for tensor in (*self._keys, *self._values):
            tensor[:, to_page, to] = tensor[:, page, at]

    @property
    def _copied(self) -> int:
        """The numbers of a token that are copied at once, at most: its keys and values, or one of them twice."""
        return max(2 * shape.heads * max(shape.key_size, shape.value_size) for shape in self._shapes)

    def _empty(self, heads: int, pages: int, size: int) -> torch.Tensor:
        # What is masked is multiplied by 0, and memory may hold NaN.  Written, so that it is held from now on.
        return torch.empty(heads, pages, PAGE, size, dtype=self._dtype, device=self._device).zero_()


class CacheView(Cache):
    """A ``PagedCache`` as one forward pass sees it.

    Keys and values that a layer is given may be overwritten when the next layer asks for its own.

    Args:
        tables: the pages of each row of the batch.
        columns: column of each new token, ``[rows, queries]``; -1 for padding.
        length: columns that the pass looks at.  Those that a row has no page for show its first page, or others that
            hold no NaN.
    """

    def __init__(self, cache: PagedCache, tables: Sequence[Sequence[int]], columns: np.ndarray, length: int) -> None:
        super().__init__(layers=[])
        self._cache, self._length, self._queries = cache, length, columns.shape[1]
        count = pages_for(length)
        self._shown = np.array([[*table[:count], *[table[0]] * (count - len(table))] for table in tables])
        places = np.where(columns < 0, 0, np.take_along_axis(self._shown, columns.clip(0) // PAGE, 1))
        self._pages, self._offsets = (torch.from_numpy(one).to(cache._device) for one in (places, columns % PAGE))
        self._apart = self._evenly_apart()
        self._gathered: dict[int, torch.Tensor] = {}  # by heads

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new keys and values, ``[rows, heads, queries, size]``; all that the pass looks at."""
        keys, values = self._cache._keys[layer_idx], self._cache._values[layer_idx]
        keys[:, self._pages, self._offsets] = key_states.transpose(0, 1)
        values[:, self._pages, self._offsets] = value_states.transpose(0, 1)
        if self._apart is not None:
            return self._seen(keys, self._apart), self._seen(values, self._apart)
        first = self._gather(keys, 0)
        return first, self._gather(values, self._shown.size * keys[:, 0].numel())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length - self._queries

    def _evenly_apart(self) -> int | None:
        """The pages from each row's first one to the next row's, if the pages of a row follow each other."""
        first = self._shown[:, :1]
        apart = int(first[1, 0] - first[0, 0]) if len(first) > 1 else 0
        if (np.diff(first[:, 0]) != apart).any() or apart < 0:
            return None
        return apart if (self._shown == first + np.arange(self._shown.shape[1])).all() else None

    def _seen(self, pool: torch.Tensor, apart: int) -> torch.Tensor:
        heads, pages, _, size = pool.shape
        shape, strides = (
            (len(self._shown), heads, self._length, size),
            (apart * PAGE * size, pages * PAGE * size, size, 1),
        )
        return pool.as_strided(shape, strides, int(self._shown[0, 0]) * PAGE * size)

    def _gather(self, pool: torch.Tensor, begin: int) -> torch.Tensor:
        """All columns of all rows, ``[rows, heads, columns, size]``, in the copy from this number on."""
        heads, all_pages, _, size = pool.shape
        rows, pages = self._shown.shape
        if heads not in self._gathered:
            index = self._shown[:, None] + all_pages * np.arange(heads)[:, None]
            self._gathered[heads] = torch.from_numpy(index.ravel()).to(pool.device)
        index = self._gathered[heads]
        copy = self._cache.copy(begin, len(index) * PAGE * size)
        torch.index_select(pool.view(-1, PAGE * size), 0, index, out=copy.view(-1, PAGE * size))
        return copy.view(rows, heads, pages * PAGE, size)[:, :, : self._length]


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


def cache_argument(model: Any) -> str:
    """Return the name of the argument for a ``transformers`` model's cache, which is ``cache`` in newer releases."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def probe_shapes(model: Any, kinds: Sequence[str]) -> list[LayerShape]:
    """Return the shape of each layer's keys and values in a ``transformers`` model, by a pass over one token.

    Args:
        kinds: kinds of attention that its layers have; with several, each has a mask of its own.

    Raises:
        TaskError: the layers do not all keep keys and values.
    """
    probe = _Probe()
    device, dtype = model.device, model.dtype
    mask = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
    with torch.inference_mode():
        base = model.base_model
        base(
            input_ids=torch.zeros(1, 1, dtype=torch.long, device=device),
            position_ids=torch.zeros(1, 1, dtype=torch.long, device=device),
            attention_mask=dict.fromkeys(kinds, mask) if len(kinds) > 1 else mask,
            use_cache=True,
            **{cache_argument(base): probe},
        )
    if sorted(probe.shapes) != list(range(len(probe.shapes))) or not probe.shapes:
        kept = f"layers {sorted(probe.shapes)}" if probe.shapes else "no layer"
        raise TaskError(f"{type(model).__name__} keeps keys and values in {kept}; expected in each of its layers")
    return [probe.shapes[layer] for layer in sorted(probe.shapes)]
