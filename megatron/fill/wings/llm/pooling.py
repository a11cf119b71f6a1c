"""Pooling of a model's hidden states to one vector, as the job or the model's folder sets it."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.fill.errors import TaskError
from megatron.fill.wings.llm.sequence import Pooling

_FILE = "1_Pooling/config.json"  # of sentence-transformers
_ASKED: dict[str, Pooling] = {"last": "last", "mean": "mean"}
_MODES: dict[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_MODES |= {"lasttoken": "last", "mean": "mean"}  # of newer versions


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
        modes = [name for name, given in said.items() if name.startswith("pooling_mode_") and given is True]
        if isinstance(mode := said.get("pooling_mode"), str):
            modes = [mode]
    except (OSError, ValueError, AttributeError) as error:
        raise TaskError(f"{model / _FILE} cannot be read: {error}") from error
    if len(modes) != 1 or modes[0] not in _MODES:
        raise TaskError(
            f"{model / _FILE} asks for {', '.join(modes) or 'no pooling'}: expected the last token or the mean"
        )
    return _MODES[modes[0]]
