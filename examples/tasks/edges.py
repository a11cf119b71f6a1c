"""Graphs for the graph side tasks: read from files in SNAP's format, or generated."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron.fill.sidetask.checks import check_whole

_ZIPF = 0.75  # node i draws edges in proportion to i**-0.75: degrees with a power law of exponent 1 + 1/0.75


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A directed graph.

    Attributes:
        ids: number of each node in the file; everything else numbers nodes from 0.
        sources, targets: the two ends of each edge.
        values: third column of the file; None if it has none.
    """

    ids: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    values: np.ndarray | None = None

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.targets.data, zlib.crc32(self.sources.data))


def power_law_graph(nodes: int, edges: int, seed: int) -> Graph:
    """Generate a graph of ``edges`` distinct edges without loops, whose in- and out-degrees follow power laws.

    Raises:
        ValueError: ``edges`` is more than a quarter of all pairs of nodes.
    """
    if not 1 <= edges <= nodes * (nodes - 1) // 4:
        most = nodes * (nodes - 1) // 4
        raise ValueError(f"edges is {edges}: expected 1 to {most}, a quarter of all pairs, for {nodes} nodes")
    generator = np.random.default_rng(seed)
    cumulative = np.cumsum(np.arange(1, nodes + 1) ** -_ZIPF)
    popular = [generator.permutation(nodes) for _ in range(2)]  # the largest senders are not the largest receivers
    keys = np.empty(0, np.int64)
    while len(keys) < edges:
        draws = generator.random((2, edges + edges // 2)) * cumulative[-1]
        sources, targets = (popular[end][np.searchsorted(cumulative, draws[end])] for end in range(2))
        new = sources * nodes + targets
        keys = np.unique(np.concatenate([keys, new[sources != targets]]))
    keys = np.sort(generator.permutation(keys)[:edges])
    return Graph(np.arange(nodes), keys // nodes, keys % nodes)


def read_graph(path: Path) -> Graph:
    """Read an edge list in SNAP's format: lines ``from to [value]``, ``#`` before comments; ``.gz`` or not.

    Raises:
        ValueError: the file cannot be read, or a line is not an edge; the message has the line and what was expected.
    """
    try:
        with _open(path) as file:
            columns = next((len(words) for line in file if (words := line.partition("#")[0].split())), 0)
        if columns not in (2, 3):
            raise ValueError(_find_fault(path) or f"{path}: found no edge; expected lines 'from to'")
        fields = [("from", np.int64), ("to", np.int64), ("value", np.float64)][:columns]
        try:
            with _open(path) as file:
                table = np.loadtxt(file, dtype=fields, comments="#", ndmin=1)
        except ValueError as error:
            raise ValueError(_find_fault(path) or f"{path}: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: cannot be read: {reason}; expected an edge list") from error
    values = table["value"] if columns == 3 else None
    if values is not None and not np.isfinite(values).all():
        raise ValueError(_find_fault(path))
    ids, index = np.unique(np.concatenate([table["from"], table["to"]]), return_inverse=True)
    return Graph(ids, index[: len(table)], index[len(table) :], values)


def _open(path: Path) -> IO[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8", errors="replace")


def _find_fault(path: Path) -> str:
    """A message about the first line that is not an edge, or ''; numpy's messages count rows without comments."""
    columns = 0
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            words = line.partition("#")[0].split()
            expected = f"'from to{' value' * (columns == 3)}' as before" if columns else "'from to' or 'from to value'"
            if words and (len(words) not in (2, 3) or columns not in (0, len(words)) or not _is_edge(words)):
                return f"{path}, line {number}: found {line.strip()[:60]!r}; expected {expected}, the first two int64"
            columns = columns or len(words)
    return ""


def _is_edge(words: list[str]) -> bool:
    try:
        ends = [int(word) for word in words[:2]]
        return all(-(2**63) <= end < 2**63 for end in ends) and all(math.isfinite(float(word)) for word in words[2:])
    except ValueError:
        return False


def load_graph(edges: int | str, nodes: int, seed: int) -> Graph:
    """Read the graph from the file ``edges``, or generate a graph of ``edges`` edges.

    Raises:
        ValueError: an argument is out of range, or the file has a line that is not an edge.
    """
    if isinstance(edges, str):
        return read_graph(Path(edges).expanduser())
    check_whole(edges=(edges, 1), nodes=(nodes, 2), seed=(seed, 0))
    return power_law_graph(nodes, edges, seed)


def check_same_graph(checksum: int, state: Mapping[str, Any]) -> None:
    """Check that a checkpoint belongs to the graph with this checksum.

    Raises:
        ValueError: it belongs to another graph.
    """
    if state["graph"] != checksum:
        raise ValueError(f"the checkpoint is of another graph ({state['graph']:08x}); expected {checksum:08x}")
