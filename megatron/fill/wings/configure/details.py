"""Settings in Megatron's flags that decide memory, but not time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.fill.wings.mainjob.model import ModelSpec


def detailed(model: ModelSpec, flags: Sequence[str]) -> ModelSpec:
    """The model with its position embeddings and dropout, by Megatron's defaults where flags say nothing."""
    kind = _value(flags, "--position-embedding-type") or "learned_absolute"
    if "--use-rotary-position-embeddings" in flags:
        kind = "rope"
    positions = 0
    if kind == "learned_absolute":
        given = _value(flags, "--max-position-embeddings") or ""
        positions = int(given) if given.isdecimal() and given.isascii() else model.sequence
    return replace(
        model,
        positions=positions,
        hidden_dropout=_is_some(_value(flags, "--hidden-dropout")),
        attention_dropout=_is_some(_value(flags, "--attention-dropout")),
    )


def _value(flags: Sequence[str], name: str) -> str | None:
    """Value of the last flag of a name."""
    found = None
    for at, flag in enumerate(flags):
        head, equals, tail = flag.partition("=")
        if head == name:
            found = tail if equals else (flags[at + 1] if at + 1 < len(flags) else None)
    return found


def _is_some(dropout: str | None) -> bool:
    try:
        return dropout is None or float(dropout) != 0
    except ValueError:
        return True  # Megatron will say what is wrong with it
