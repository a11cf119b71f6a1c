"""Files for plans: bubble cycles of ``--fill-profile-only``, and profiles of ``pipefill profile --output``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_json
from megatron.fill.given.problems import explain
from megatron.fill.profiles import BubbleCycle, BubbleSlot, JobProfile, profiles_from_list
from megatron.fill.types import BubbleKind

NOT_MEASURED = sys.maxsize  # bytes: a free memory that any job fits
_MOST_MS = 1e9  # ten days

_Ms = Annotated[float, Field(ge=0, le=_MOST_MS)]


class _Bubble(BaseModel):
    """The fields of ``CycleBubble`` that a plan needs; the class itself would pull in the report's libraries."""

    kind: BubbleKind
    p10_ms: _Ms
    free_bytes: Annotated[int, Field(ge=0)]


class _Rank(BaseModel):
    rank: int
    iteration_ms: Annotated[float, Field(gt=0, le=_MOST_MS)] | None
    training: tuple[_Bubble, ...]


class _File(BaseModel):
    ranks: tuple[_Rank, ...]


def load_cycles(path: str | Path) -> dict[int, BubbleCycle]:
    """Read the training bubbles of each rank from a ``bubbles.json``.

    A bubble's duration is the 10th percentile of the measured ones: a step that runs past its bubble delays the
    training, so a plan should fit nine times out of ten.  ``free_bytes`` of 0 means that it was not measured; such a
    bubble takes a node of any size.

    Raises:
        ConfigError: the file is invalid; the message names the file, the field, the value, and what was expected.
    """
    expected = "a file of --fill-profile-only"
    data = read_json(path, expected)
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        suffix = f"; expected {expected}" if error.errors()[0]["type"] == "missing" else ""
        raise ConfigError(explain(error, _File, lambda place: (str(path), place), suffix, most=1)) from error
    cycles = {}
    for at, rank in enumerate(file.ranks):
        if rank.iteration_ms is None and rank.training:
            raise ConfigError(f"{path}: ranks.{at}.iteration_ms is null: expected the time of an iteration")
        slots = (BubbleSlot(b.kind, round(b.p10_ms * 1e6), b.free_bytes or NOT_MEASURED) for b in rank.training)
        cycles[rank.rank] = BubbleCycle(round((rank.iteration_ms or 0) * 1e6), tuple(slots))
    return cycles


def load_profiles(path: str | Path) -> dict[str, tuple[JobProfile, ...]]:
    """Read each job's profiles, by name, from a file of ``pipefill profile --output``; ConfigError if it is none."""
    expected = "a list of profiles per job name, one of each configuration"
    data = read_json(path, expected)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: found a {type(data).__name__}; expected {expected}")
    found = {}
    for name, entries in data.items():
        try:
            found[name] = profiles_from_list(entries)
        except ValueError as error:
            raise ConfigError(f"{path}: job {name!r}: {error}; expected {expected}") from error
    return found
