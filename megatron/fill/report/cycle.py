"""The bubble cycle of a rank: statistics of each bubble of the iteration, over the iterations of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.fill.linux.files import write_text
from megatron.fill.report.schema import CycleBubble, Cycles, RankCycle
from megatron.fill.report.seen import KINDS, Bubbles, Seen

_MS = 1e6  # nanoseconds


def bubble_cycle(seen: Seen) -> RankCycle:
    """Return the cycle over the iterations with the most common number of bubbles.

    The run's first iteration, which compiles and allocates, is left out if others follow.
    """
    its, bubbles = seen.iterations, seen.bubbles
    used = its.number > its.number.min() if len(its.number) > 1 else np.ones(len(its.number), dtype=bool)
    order = np.argsort(its.number[used], kind="stable")
    numbers, starts, durations = (values[used][order] for values in (its.number, its.start, its.duration))
    training = np.flatnonzero(~bubbles.outside & ~bubbles.forward_only & np.isin(bubbles.iteration, numbers))
    kept = _most_common(bubbles, training, bubbles.iteration[training])
    evaluations = _evaluations(bubbles)
    if len(kept):
        at = np.searchsorted(numbers, bubbles.iteration[kept[:, 0]])
        starts, durations = starts[at], durations[at]
    mean_ns = float(durations.mean()) if len(durations) else None
    return RankCycle(
        rank=seen.info.rank,
        stage=seen.info.stage,
        iteration_ms=None if mean_ns is None else mean_ns / _MS,
        training=_cycle(bubbles, kept, starts, mean_ns),
        evaluation=_cycle(bubbles, evaluations, bubbles.start[evaluations[:, :1].ravel()], None),
    )


def write_cycles(path: Path, cycles: Sequence[RankCycle]) -> None:
    write_text(path, Cycles(ranks=list(cycles)).model_dump_json(indent=2) + "\n")


def _evaluations(bubbles: Bubbles) -> np.ndarray:
    """Return ``_most_common`` of the evaluation iterations' bubbles, each begun by an index that does not increase."""
    chosen = np.flatnonzero(~bubbles.outside & bubbles.forward_only & (bubbles.index >= 0))
    chosen = chosen[np.argsort(bubbles.start[chosen], kind="stable")]
    index, iteration = bubbles.index[chosen], bubbles.iteration[chosen]
    begins = np.ones(len(chosen), dtype=np.int64)
    begins[1:] = (index[1:] <= index[:-1]) | (iteration[1:] != iteration[:-1])
    return _most_common(bubbles, chosen, np.cumsum(begins))


def _most_common(bubbles: Bubbles, chosen: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return the groups with the most common number of bubbles: one row of bubble positions per group, ordered by time.

    ``group`` has the group's number of each bubble at the positions ``chosen``.
    """
    if not len(chosen):
        return np.zeros((0, 0), dtype=np.int64)
    _, first, which, sizes = np.unique(group, return_index=True, return_inverse=True, return_counts=True)
    in_time = sizes[np.argsort(first)]
    lengths, counts = np.unique(in_time, return_counts=True)
    length = in_time[np.isin(in_time, lengths[counts == counts.max()])][0]
    fits = sizes[which] == length
    rows = chosen[fits]
    order = np.lexsort((bubbles.start[rows], first[which][fits]))
    return rows[order].reshape(-1, length)


def _cycle(bubbles: Bubbles, rows: np.ndarray, starts: np.ndarray, iteration_ns: float | None) -> list[CycleBubble]:
    if not len(rows):
        return []
    durations = bubbles.duration[rows] / _MS
    offsets = np.median(bubbles.start[rows] - starts[:, None], axis=0) / _MS
    means = durations.mean(axis=0)
    p10, p50, p90 = np.percentile(durations, [10, 50, 90], axis=0)
    free = bubbles.free_bytes[rows].min(axis=0)
    kinds = [np.bincount(column).argmax() for column in bubbles.kind[rows].T]
    return [
        CycleBubble(
            index=index,
            kind=KINDS[kinds[index]],
            mean_ms=float(means[index]),
            median_ms=float(p50[index]),
            p10_ms=float(p10[index]),
            p90_ms=float(p90[index]),
            offset_ms=float(offsets[index]),
            share=float(means[index]) * _MS / iteration_ns if iteration_ns else None,
            free_bytes=int(free[index]),
            count=len(rows),
        )
        for index in range(rows.shape[1])
    ]
