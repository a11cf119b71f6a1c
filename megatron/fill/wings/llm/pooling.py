"""Pooling of a model's hidden states to one vector, as the job or the model's folder sets it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.fill.errors import TaskError
from megatron.fill.wings.llm.requests import Refused, Request
from megatron.fill.wings.llm.sequence import Pooling

_FILE = "1_Pooling/config.json"  # of sentence-transformers
_KNOWN: dict[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_ASKED: dict[str, Pooling] = {"last": "last", "mean": "mean"}
_NAMES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean"}


def read_pooling(asked: str, model: Path) -> Pooling:
    """The pooling of a job.

    Args:
        asked: ``auto``, ``last`` or ``mean``.

    Raises:
        ValueError: it is none of them.
        TaskError: the folder asks for another one.
    """
    if asked in _ASKED:
        return _ASKED[asked]
    if asked != "auto":
        raise ValueError(f"pooling is {asked!r}: expected auto, last or mean")
    if not (model / _FILE).is_file():
        return "last"
    try:
        said = json.loads((model / _FILE).read_text(encoding="utf-8"))
        if isinstance(mode := said.get("pooling_mode"), str):  # of newer versions
            modes, found = [mode], [_NAMES.get(mode)]
        else:
            modes = [name for name, given in said.items() if name.startswith("pooling_mode_") and given is True]
            found = [_KNOWN.get(name) for name in modes]
    except (OSError, ValueError, AttributeError) as error:
        raise TaskError(f"{model / _FILE} cannot be read: {error}") from error
    if len(found) != 1 or found[0] is None:
        raise TaskError(
            f"{model / _FILE} asks for {', '.join(modes) or 'no pooling'}: expected the last token or the mean"
        )
    return found[0]


def can_embed(model: Any, lines: Iterable[Request | Refused]) -> bool:
    """True if the model gives the hidden states that embeddings are made of, or no embeddings are requested."""
    from megatron.fill.wings.llm.passes import gives_hidden_states

    asked = any(isinstance(line, Request) and line.encoding is not None for line in lines)
    return not asked or gives_hidden_states(model)
