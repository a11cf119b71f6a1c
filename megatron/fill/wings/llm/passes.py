"""Forward passes of ``transformers`` models over rows of tokens, cut by layers so that each piece fits a bubble."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from greenlet import GreenletExit, getcurrent, greenlet

from megatron.fill.errors import TaskError
from megatron.fill.wings.llm.attention import attention_kinds, attention_masks, text_config
from megatron.fill.wings.llm.cache import PAGE, CacheView, PagedCache, cache_argument, pages_for, probe_shapes
from megatron.fill.wings.llm.grouping import grouped, pass_cost


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The layers that a pass runs one after the other; TaskError if the model has none that can be found."""
    count = getattr(text_config(model), "num_hidden_layers", None)
    lists = [list(one) for one in model.modules() if isinstance(one, torch.nn.ModuleList) and len(one) == count]
    if not lists:
        raise TaskError(
            f"{type(model).__name__} has no torch.nn.ModuleList of its {count} layers; expected a decoder-only model"
        )
    return max(lists, key=lambda layers: sum(p.numel() for layer in layers for p in layer.parameters()))


def token_rows(model: Any) -> int:
    """Token ids that a model can be given and can give are below it."""
    given, gives = model.get_input_embeddings(), model.get_output_embeddings()
    return min(len(one.weight) for one in (given, gives) if one is not None)


def gives_hidden_states(model: Any) -> bool:
    """True if a pass without logits gives the hidden states after the last layer; by a pass over one token."""
    with torch.inference_mode():
        found = _base(model)(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    return getattr(found, "last_hidden_state", None) is not None


def _base(model: Any) -> Any:
    """The model without what makes logits of its hidden states."""
    base = model.base_model
    return (
        model.get_decoder() if base is model else base
    )  # as of Llama 4's text models, whose prefix names no attribute


class LayeredPass:
    """Runs functions that run a model, and pauses them between pieces of its layers.

    All functions come to the same layer before any resumes.  Greenlets, and not threads: the runtime holds a step with
    a signal, which reaches the main thread only.

    Args:
        layers: the model's layers.
        pieces: number of pieces of a pass, 1 to the number of layers.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], pieces: int) -> None:
        self.pieces = max(1, min(pieces, len(layers)))
        self._running: list[greenlet] = []
        self._results: list[Any] = []
        self._joined: Callable[[list[Any]], Any] = list
        self.result: Any = None  # of the latest functions that have ended, joined
        cuts = [layers[piece * len(layers) // self.pieces] for piece in range(1, self.pieces)]
        self._hooks = [layer.register_forward_pre_hook(self._pause) for layer in cuts]

    def begin(self, functions: Sequence[Callable[[], Any]], joined: Callable[[list[Any]], Any] = list) -> None:
        """The next ``run`` starts these functions; those that have not ended are abandoned.

        Args:
            joined: makes the result of what each function returns.
        """
        self.abandon()
        self._running, self._joined = [greenlet(function) for function in functions], joined
        self._results = [None] * len(functions)

    def run(self) -> bool:
        """Run the next piece; whether it was the last one."""
        assert self._running
        with torch.inference_mode():
            for at, running in enumerate(self._running):
                if not running.dead:
                    self._results[at] = running.switch()
            if not all(running.dead for running in self._running):
                return False
            self.result, self._running, self._results = self._joined(self._results), [], []
        return True

    def abandon(self) -> None:
        for running in self._running:
            if running:
                running.throw(GreenletExit)
        self._running, self._results = [], []

    def remove(self) -> None:
        """Cut the model's passes no more."""
        self.abandon()
        for hook in self._hooks:
            hook.remove()

    def _pause(self, *_: Any) -> None:
        running = getcurrent()
        if running in self._running:  # not so in a pass that nobody cuts
            parent = running.parent
            assert parent is not None
            parent.switch()


def layer_by_layer(layers: Sequence[torch.nn.Module], function: Callable[[], Any]) -> Generator[None]:
    """Run a function that runs a model as it likes, by ``LayeredPass`` too; yields before every layer.

    What the function raises is raised here.
    """
    outside = getcurrent()
    running = paused = greenlet(function)

    def pause(*_: Any) -> None:
        nonlocal paused
        paused = getcurrent()  # the function's own, or that of a pass in it
        outside.switch()

    hooks = [layer.register_forward_pre_hook(pause) for layer in layers]
    try:
        while True:
            with torch.inference_mode():
                paused.switch()
            if running.dead:
                return
            yield
    finally:
        if running:
            with torch.inference_mode():  # what the function leaves leads back to this
                running.throw(GreenletExit)
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True, slots=True)
class RowInput:
    """The new tokens of one sequence in a pass."""

    pages: Sequence[int]  # the sequence's, with room for all columns
    tokens: Sequence[int]  # each one's id
    columns: Sequence[int]  # each one's, in the cache
    positions: Sequence[int]  # each one's place in the sequence
    visible: np.ndarray  # the columns that each one may attend to, ``[tokens, columns]`` of bool
    held: np.ndarray | None = None
    """The place in the sequence of the token in each column, ``[columns]``; None if it is the column's number."""

    @classmethod
    def following(cls, pages: Sequence[int], tokens: Sequence[int], start: int) -> RowInput:
        """Tokens that follow the ``start`` tokens before them, one after the other."""
        places = range(start, start + len(tokens))
        visible = np.tri(len(tokens), start + len(tokens), start, dtype=bool)
        return cls(pages, tokens, places, places, visible)


def _joined(groups: list[list[int]], results: list[Any]) -> Any:
    """The results of groups of rows in the order of the rows."""
    if results[0] is None or groups == [list(range(len(results[0])))]:
        return results[0]
    rows, queries = sum(map(len, groups)), max(found.shape[1] for found in results)
    joined = results[0].new_zeros(rows, queries, results[0].shape[2])
    for group, found in zip(groups, results, strict=True):
        joined[group, : found.shape[1]] = found
    return joined


class ModelRunner:
    """A model with its cache.

    Args:
        model: a model in evaluation mode, on its device.
        context: limit on a sequence's tokens.
        pieces: number of pieces of a pass.
        vocabulary: vocabulary size.  Ids that a model has beyond it stand for nothing; a draft may have fewer.  None
            for all ids that the model has.
    """

    def __init__(self, model: Any, context: int, pieces: int = 1, vocabulary: int | None = None) -> None:
        self.model, self.context = model, context
        self._rows = token_rows(model)
        self._vocabulary = vocabulary or self._rows
        self._device, self._dtype = model.device, model.dtype  # the model looks through its weights for them
        self._kinds = attention_kinds(model)
        self.cache = PagedCache(probe_shapes(model, list(self._kinds)), model.dtype, str(model.device))
        self._cache_argument = cache_argument(model)
        self.passes = LayeredPass(decoder_layers(model), pieces)
        self._cost = pass_cost(model, self.cache.token_bytes // model.dtype.itemsize)

    def begin(self, rows: Sequence[RowInput], logits: bool = True) -> None:
        """Begin a pass; ``passes.run`` runs its pieces, and leaves ``[rows, queries, vocabulary]`` as its result.

        Rows of different sizes pass through the model in batches of their own, where that is faster.

        Args:
            logits: else the result is the hidden states after the last layer, ``[rows, queries, hidden]``; None if the
                model gives none (``gives_hidden_states``).
        """
        groups = self.groups(rows)

        def function(group: list[int]) -> Any:
            inputs = self._inputs([rows[at] for at in group])
            if logits:
                found = self.model(**inputs).logits[..., : min(self._rows, self._vocabulary)]
                lacking = self._vocabulary - found.shape[-1]
                return torch.nn.functional.pad(found, (0, lacking), value=-torch.inf) if lacking else found
            return getattr(_base(self.model)(**inputs), "last_hidden_state", None)

        self.passes.begin([partial(function, group) for group in groups], partial(_joined, groups))

    def groups(self, rows: Sequence[RowInput]) -> list[list[int]]:
        """The rows that pass through the model in a batch."""
        columns = [pages_for(row.visible.shape[1]) * PAGE for row in rows]
        found = grouped([len(row.tokens) for row in rows], columns, self._cost, (self.cache.pages + 1) * PAGE)
        return [sorted(group, key=lambda at: rows[at].pages[0]) for group in found]

    def _inputs(self, rows: Sequence[RowInput]) -> dict[str, Any]:
        queries = max(len(row.tokens) for row in rows)
        length = max(row.visible.shape[1] for row in rows)
        ids, positions = np.zeros((2, len(rows), queries), dtype=np.int64)
        columns = np.full((len(rows), queries), -1, dtype=np.int64)
        visible = np.zeros((len(rows), 1, queries, length), dtype=bool)
        held = np.tile(np.arange(length), (len(rows), 1))
        for at, row in enumerate(rows):
            count = len(row.tokens)
            ids[at, :count], columns[at, :count], positions[at, :count] = row.tokens, row.columns, row.positions
            visible[at, 0, :count, : row.visible.shape[1]] = row.visible
            if row.held is not None:
                held[at, : len(row.held)] = row.held
        ids[ids >= self._rows] = 0  # of a draft that lacks them: what it proposes then is no worse than anything
        device = self._device
        masks = {
            kind: self._mask(seen) for kind, seen in attention_masks(self._kinds, visible, positions, held).items()
        }
        view = CacheView(self.cache, [row.pages for row in rows], columns, length)
        return {
            "input_ids": torch.from_numpy(ids).to(device),
            "position_ids": torch.from_numpy(positions).to(device),
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
            "use_cache": True,
            self._cache_argument: view,
        }

    def _mask(self, seen: np.ndarray) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(torch.from_numpy(~seen).to(self._device), torch.finfo(self._dtype).min)
