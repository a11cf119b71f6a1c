"""The tokens that each layer of a model attends to, and how many a sequence may have: read from its config."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.fill.errors import TaskError

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_LENGTH_NAME = re.compile(r"^(?!.*(expert|layer)).*(window|chunk|original|local|block_size)")
# Rotary positions that change for a whole sequence once it is longer: what was computed before would be wrong.
_CHANGING_ROPES = ("longrope", "su", "yarn_dynamic")


@dataclass(frozen=True, slots=True)
class Context:
    """Limit on the tokens of a sequence."""

    tokens: int  # limit, the prompt included
    reason: str | None = None  # cause of a limit below the model's own; None if it is the model's own


def text_config(model: Any) -> Any:
    """The part of a model's config that is about its decoder of text."""
    return model.config.get_text_config(decoder=True)


def context_of(model: Any) -> Context:
    """The tokens that a sequence may have; TaskError if no limit is to be found in the config."""
    config, name = text_config(model), type(model).__name__
    limit = next((found for key in _LENGTHS if (found := _whole(config, key)) is not None), None)
    if limit is None:
        raise TaskError(f"{name} has no limit of its positions in config.json; expected max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    for one in ropes:
        if one.get("rope_type", one.get("type")) in _CHANGING_ROPES:
            original = one.get("original_max_position_embeddings") or _whole(config, "original_max_position_embeddings")
            if original and original < limit:
                return Context(
                    int(original),
                    f"beyond {original} tokens (original_max_position_embeddings) {name} has other rotary positions "
                    "for the whole sequence, so that its keys and values would have to be computed again",
                )
    return Context(limit)


def attention_kinds(model: Any) -> dict[str, int]:
    """The kinds of attention in a model's layers: tokens of each one's window or chunk, 0 for all tokens.

    Raises:
        TaskError: some layers attend in another way, or the config does not say how far.
    """
    config, name = text_config(model), type(model).__name__
    window = _whole(config, "sliding_window") if getattr(config, "use_sliding_window", True) else None
    sizes = {
        "full_attention": 0,
        "sliding_attention": window,
        "chunked_attention": _whole(config, "attention_chunk_size"),
    }
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    if unknown := sorted(set(types) - set(sizes)):
        raise TaskError(f"{name} has layers of {', '.join(unknown)}; expected layers of {', '.join(sorted(sizes))}")
    found = {}
    for kind in dict.fromkeys(types):
        size = sizes[kind]
        if size is None:
            raise TaskError(f"{name} has layers of {kind} and its config.json does not say of how many tokens")
        found[kind] = size
    return found


def attention_masks(
    kinds: dict[str, int], visible: np.ndarray, queries: np.ndarray, columns: np.ndarray
) -> dict[str, np.ndarray]:
    """The mask of each kind of layer: the visible columns within its window or chunk.

    Args:
        kinds: as ``attention_kinds`` gives them.
        visible: ``[rows, 1, queries, columns]`` of bool.
        queries: the position of each new token in its sequence, ``[rows, queries]``.
        columns: the position of the token in each column, ``[rows, columns]``.
    """
    found, query, column = {}, queries[:, None, :, None], columns[:, None, None, :]
    for kind, size in kinds.items():
        if not size:
            found[kind] = visible
        elif kind == "sliding_attention":
            found[kind] = visible & (query - column < size)
        else:
            found[kind] = visible & (query // size == column // size)
    return found


def marks(model: Any) -> list[int]:
    """Numbers of tokens at which a model may change how it attends or counts positions, the least first.

    Every whole number of its config that is named like a window, a chunk or an original length, below its context.
    """
    limit, found = context_of(model).tokens, set()

    def look(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, one in value.items():
                look(one, str(key))
        elif type(value) is int and 1 < value < limit and _LENGTH_NAME.search(name):
            found.add(value)

    look(text_config(model).to_dict(), "")
    return sorted(found)


def _whole(config: Any, name: str) -> int | None:
    try:
        found = getattr(config, name, None)
    except Exception:  # some configs raise for what they do not have
        return None
    return found if type(found) is int and found > 0 else None
