"""Measured latency and bandwidth between each pair of ranks of a cluster; ``pipefill network`` writes them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_json
from megatron.fill.given.problems import shown
from megatron.fill.linux.files import write_text

BACKENDS = ("gloo", "nccl")
_EXPECTED = "a file that pipefill network has written"


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a rank: where it runs."""

    host: str
    local_rank: int

    def __str__(self) -> str:
        return f"{self.host}:{self.local_rank}"


@dataclass(frozen=True, slots=True)
class Network:
    """The network between N ranks.  In each matrix the row is the sender and the column the receiver.

    A message of n bytes takes ``latency_s + n / bandwidth_bytes_per_s``.
    """

    ranks: tuple[Place, ...]  # the N places, in the order of the ranks that measured; each once
    bandwidth_bytes_per_s: tuple[tuple[float | None, ...], ...]  # N x N, above 0; None on the diagonal
    latency_s: tuple[tuple[float, ...], ...]  # N x N, one way, above 0; 0 on the diagonal
    # N x N, the interquartile range of the time of the longest message, relative to its median; 0 on the diagonal.
    spread: tuple[tuple[float, ...], ...]
    backend: str  # library that moved the messages, ``gloo`` or ``nccl``
    measured_at: str  # ISO 8601, with its offset from UTC

    @classmethod
    def load(cls, path: Path) -> Network:
        """Read what ``save`` has written; the diagonals may be null or 0 in each matrix.

        Raises:
            ConfigError: it cannot be read, or a field is wrong; the message names file and field.
        """
        data = read_json(path, _EXPECTED)
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: found {shown(data)}: expected {_EXPECTED}")
        fields = list(cls.__dataclass_fields__)
        for name in data:
            if name not in fields:
                raise ConfigError(f"{path}: unknown field {name}; expected {', '.join(fields)}")
        for name in fields:
            if name not in data:
                raise ConfigError(f"{path}: {name} is missing; expected {_EXPECTED}")
        try:
            ranks = _places(data["ranks"])
            return cls(
                ranks=ranks,
                bandwidth_bytes_per_s=_matrix(data["bandwidth_bytes_per_s"], "bandwidth_bytes_per_s", len(ranks), None),
                latency_s=_matrix(data["latency_s"], "latency_s", len(ranks), 0.0),
                spread=_matrix(data["spread"], "spread", len(ranks), 0.0, may_be_0=True),
                backend=_backend(data["backend"]),
                measured_at=_time(data["measured_at"]),
            )
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all; OSError if it cannot be written."""
        rows = [f" {json.dumps(name)}: {_shown(value)}" for name, value in asdict(self).items()]
        write_text(path, "{\n" + ",\n".join(rows) + "\n}\n")


def _shown(value: Any) -> str:
    """As JSON, with a line for each row of a matrix."""
    if isinstance(value, str):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"


def _places(data: Any) -> tuple[Place, ...]:
    if not isinstance(data, list):
        raise ValueError(f"ranks is {shown(data)}: expected a list")
    found: list[Place] = []
    for number, rank in enumerate(data):
        if not isinstance(rank, dict) or set(rank) != {"host", "local_rank"}:
            raise ValueError(f"ranks[{number}] is {shown(rank)}: expected host and local_rank")
        if not isinstance(rank["host"], str) or not rank["host"]:
            raise ValueError(f"ranks[{number}].host is {shown(rank['host'])}: expected a name")
        if type(rank["local_rank"]) is not int or rank["local_rank"] < 0:
            raise ValueError(f"ranks[{number}].local_rank is {shown(rank['local_rank'])}: expected 0 or more")
        place = Place(rank["host"], rank["local_rank"])
        if place in found:
            raise ValueError(f"ranks[{number}] is {place}, as ranks[{found.index(place)}]: expected each once")
        found.append(place)
    if len(found) < 2:
        raise ValueError(f"ranks has {len(found)} entries: expected two or more")
    return tuple(found)


def _matrix(data: Any, name: str, size: int, own: float | None, may_be_0: bool = False) -> tuple[tuple[Any, ...], ...]:
    """Its rows, with ``own`` on the diagonal for null or 0."""
    if not isinstance(data, list):
        raise ValueError(f"{name} is {shown(data)}: expected a list of rows")
    if len(data) != size:
        raise ValueError(f"{name} has {len(data)} rows: expected {size}, one for each of ranks")
    rows = []
    for sender, row in enumerate(data):
        if not isinstance(row, list):
            raise ValueError(f"{name}[{sender}] is {shown(row)}: expected a list")
        if len(row) != size:
            raise ValueError(f"{name}[{sender}] has {len(row)} columns: expected {size}, one for each of ranks")
        for receiver, value in enumerate(row):
            where = f"{name}[{sender}][{receiver}] is {shown(value)}: expected"
            if sender == receiver:
                if value not in (None, 0):
                    raise ValueError(f"{where} {'null' if own is None else 'null or 0'}")
            elif type(value) not in (int, float) or value < 0 or (value == 0 and not may_be_0):
                raise ValueError(f"{where} a finite number{', 0 or more' if may_be_0 else ' above 0'}")
        rows.append(tuple(own if sender == receiver else value for receiver, value in enumerate(row)))
    return tuple(rows)


def _backend(data: Any) -> str:
    if data not in BACKENDS:
        raise ValueError(f"backend is {shown(data)}: expected {' or '.join(BACKENDS)}")
    return str(data)


def _time(data: Any) -> str:
    try:
        if datetime.fromisoformat(data).tzinfo is not None:
            return str(data)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"measured_at is {shown(data)}: expected such as 2026-01-31T18:00:00+00:00")
