"""The record of one rank as arrays: thousands of ranks with thousands of bubbles each are added up in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.fill.records.tables import column, names_of
from megatron.fill.types import PIPELINE_KINDS, BubbleKind, BubbleUse, RankInfo, RankRecord, WorkerRecord

KINDS = tuple(BubbleKind)
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_IN_PIPELINE = [_CODES[kind] for kind in PIPELINE_KINDS]


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """Training iterations, one array entry each; times in nanoseconds."""

    number: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    filling: np.ndarray
    block: np.ndarray
    watched: np.ndarray


@dataclass(frozen=True, slots=True)
class Bubbles:
    """Bubbles, one array entry each; times in nanoseconds, ``kind`` as its position in ``KINDS``."""

    iteration: np.ndarray
    index: np.ndarray
    kind: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    predicted: np.ndarray
    seq: np.ndarray
    free_bytes: np.ndarray
    filling: np.ndarray  # filling was on and jobs had settled
    settling: np.ndarray  # filling was on and jobs of some rank still set themselves up
    forward_only: np.ndarray

    @property
    def outside(self) -> np.ndarray:
        """True for bubbles outside the pipeline."""
        return ~np.isin(self.kind, _IN_PIPELINE)


@dataclass(frozen=True, slots=True)
class Seen:
    info: RankInfo
    iterations: IterationTimes
    bubbles: Bubbles


def seen(record: RankRecord) -> Seen:
    """Convert the record to arrays."""
    its, bubbles = record.iterations, record.bubbles
    on, iteration, index = _array(bubbles, "filling", bool), _array(bubbles, "iteration"), _array(bubbles, "index")
    # Sums of old bubbles (index -1) have no iteration; they count as filled after jobs had settled.
    settling = on & (index >= 0) & (iteration > 0) & (iteration <= record.settled_after)
    started, opened = _array(its, "start_ns"), _array(bubbles, "start_ns")
    return Seen(
        record.info,
        IterationTimes(
            number=_array(its, "iteration"),
            start=started,
            duration=_array(its, "end_ns") - started,
            filling=_array(its, "filling", bool),
            block=_array(its, "block"),
            watched=_array(its, "watched", bool),
        ),
        Bubbles(
            iteration=iteration,
            index=index,
            kind=np.array([_CODES[kind] for kind in column(bubbles, "kind")], dtype=np.int8),
            start=opened,
            duration=_array(bubbles, "end_ns") - opened,
            predicted=_array(bubbles, "predicted_ns"),
            seq=_array(bubbles, "seq"),
            free_bytes=_array(bubbles, "free_bytes"),
            filling=on & ~settling,
            settling=settling,
            forward_only=_array(bubbles, "forward_only", bool),
        ),
    )


def uses_of(workers: Sequence[WorkerRecord]) -> dict[str, np.ndarray]:
    """Return all uses of bubbles as an array of each field of ``BubbleUse``, and ``worker``: the worker's position."""
    counts = np.array([len(worker.uses) for worker in workers], dtype=np.int64)
    columns = {name: [value for its in workers for value in column(its.uses, name)] for name in names_of(BubbleUse)}
    arrays = {name: np.array(values, dtype=np.int64) for name, values in columns.items()}
    return arrays | {"worker": np.repeat(np.arange(len(workers)), counts)}


def _array(values: Sequence[Any], name: str, kind: type = np.int64) -> np.ndarray:
    return np.array(column(values, name), dtype=kind)
