"""Forward passes of ``transformers`` models over rows of tokens, cut by layers so that each piece fits a bubble."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from greenlet import GreenletExit, getcurrent, greenlet

from megatron.fill.errors import TaskError
from megatron.fill.llm.attention import AttentionKinds, text_config
from megatron.fill.llm.cache import CacheView, SlotCache, probe_shapes


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The layers that a pass runs one after the other.

    Raises:
        TaskError: the model has none that can be found.
    """
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
    """Whether a pass without logits gives the hidden states after the last layer; by a pass over one token."""
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
    """Runs a function that runs a model, and stops before every so many layers of it, to go on later.

    A greenlet, and not a thread: the runtime holds a step with a signal, which reaches the main thread only.

    Args:
        layers: of the model.
        pieces: what a pass is cut into, 1 to the number of layers.

    Attributes:
        result: what the latest function that has ended returned.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], pieces: int) -> None:
        self.pieces = max(1, min(pieces, len(layers)))
        self._running: greenlet | None = None
        self.result: Any = None
        cuts = [layers[piece * len(layers) // self.pieces] for piece in range(1, self.pieces)]
        self._hooks = [layer.register_forward_pre_hook(self._pause) for layer in cuts]

    def begin(self, function: Callable[[], Any]) -> None:
        """The next ``run`` starts this function; one that has not ended is abandoned."""
        self.abandon()
        self._running = greenlet(function)

    def run(self) -> bool:
        """Run the next piece; whether it was the last one."""
        assert self._running is not None
        with torch.inference_mode():
            result = self._running.switch()
        if not self._running.dead:
            return False
        self.result, self._running = result, None
        return True

    def abandon(self) -> None:
        """Forget a pass that has not ended."""
        if self._running is not None and self._running:
            self._running.throw(GreenletExit)
        self._running = None

    def remove(self) -> None:
        """Cut the model's passes no more."""
        self.abandon()
        for hook in self._hooks:
            hook.remove()

    def _pause(self, *_: Any) -> None:
        if getcurrent() is self._running:  # not so in a pass that nobody cuts
            parent = self._running.parent
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
    """The new tokens of one sequence in a pass.

    Attributes:
        slot: of the sequence.
        tokens, columns, positions: of each new token: its id, where it is kept, and its place in its sequence.
        visible: the columns that each new token may attend to, ``[tokens, columns]`` of bool.
        held: the place in the sequence of what each column holds, ``[columns]``; None if it is the column's number.
    """

    slot: int
    tokens: Sequence[int]
    columns: Sequence[int]
    positions: Sequence[int]
    visible: np.ndarray
    held: np.ndarray | None = None

    @classmethod
    def following(cls, slot: int, tokens: Sequence[int], start: int) -> RowInput:
        """Tokens that follow the ``start`` tokens before them, one after the other."""
        places = range(start, start + len(tokens))
        visible = np.tri(len(tokens), start + len(tokens), start, dtype=bool)
        return cls(slot, tokens, places, places, visible)


class ModelRunner:
    """A model with its cache.

    Args:
        model: in evaluation mode, on its device.
        context: tokens that a sequence may have.
        pieces: what a pass is cut into.
        vocabulary: token ids are below it.  What a model has beyond it stands for nothing; a draft may have fewer.
            None for all that the model has.
    """

    def __init__(self, model: Any, context: int, pieces: int = 1, vocabulary: int | None = None) -> None:
        self.model, self.context = model, context
        self._rows = token_rows(model)
        self._vocabulary = vocabulary or self._rows
        self._device, self._dtype = model.device, model.dtype  # the model looks through its weights for them
        self._attention = AttentionKinds.of(model)
        self.cache = SlotCache(probe_shapes(model, list(self._attention.kinds)), model.dtype, str(model.device))
        self.passes = LayeredPass(decoder_layers(model), pieces)

    def begin(self, rows: Sequence[RowInput], logits: bool = True) -> None:
        """Begin a pass; ``passes.run`` runs its pieces, and leaves ``[rows, queries, vocabulary]`` as its result.

        Args:
            logits: else the result is the hidden states after the last layer, ``[rows, queries, hidden]``; None if the
                model gives none (``gives_hidden_states``).
        """
        inputs = self._inputs(rows)

        def function() -> Any:
            if logits:
                found = self.model(**inputs).logits[..., : min(self._rows, self._vocabulary)]
                lacking = self._vocabulary - found.shape[-1]
                return torch.nn.functional.pad(found, (0, lacking), value=-torch.inf) if lacking else found
            return getattr(_base(self.model)(**inputs), "last_hidden_state", None)

        self.passes.begin(function)

    def _inputs(self, rows: Sequence[RowInput]) -> dict[str, Any]:
        queries = max(len(row.tokens) for row in rows)
        length = max(row.visible.shape[1] for row in rows)
        ids, positions = np.zeros((2, len(rows), queries), dtype=np.int64)
        columns = np.full((len(rows), queries), self.cache.capacity, dtype=np.int64)  # padding
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
        masks = {kind: self._mask(seen) for kind, seen in self._attention.masks(visible, positions, held).items()}
        view = CacheView(self.cache, [row.slot for row in rows], torch.from_numpy(columns).to(device), length)
        return {
            "input_ids": torch.from_numpy(ids).to(device),
            "position_ids": torch.from_numpy(positions).to(device),
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
            "past_key_values": view,
            "use_cache": True,
        }

    def _mask(self, seen: np.ndarray) -> torch.Tensor:
        """What is added to the scores of attention."""
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(torch.from_numpy(~seen).to(self._device), torch.finfo(self._dtype).min)
