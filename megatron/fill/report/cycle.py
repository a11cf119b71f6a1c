"""The bubble cycle of a rank: what each place in the iteration looks like, over the iterations of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron.fill.records import write_text
from megatron.fill.report.schema import CycleBubble, Cycles, RankCycle
from megatron.fill.types import Bubble, RankRecord

_MS = 1e6  # nanoseconds


def bubble_cycle(record: RankRecord) -> RankCycle:
    """The cycle over the iterations with the most common number of bubbles.

    The run's first iteration, which compiles and allocates, is left out where others follow.  An evaluation iteration
    has no record of its own: it begins with the first bubble whose index does not go up.
    """
    iterations = {item.iteration: item for item in record.iterations}
    if len(iterations) > 1:
        del iterations[min(iterations)]
    groups: defaultdict[int, list[Bubble]] = defaultdict(list)
    for bubble in record.bubbles:
        if not bubble.forward_only and bubble.iteration in iterations:
            groups[bubble.iteration].append(bubble)
    kept = _most_common(list(groups.values()))
    used = [iterations[group[0].iteration] for group in kept] or list(iterations.values())
    starts = [iterations[group[0].iteration].start_ns for group in kept]
    mean_ns = float(np.mean([item.end_ns - item.start_ns for item in used])) if used else None
    evaluations = _most_common(_evaluation_groups(record.bubbles))
    return RankCycle(
        rank=record.info.rank,
        stage=record.info.stage,
        iteration_ms=None if mean_ns is None else mean_ns / _MS,
        training=_bubbles(kept, starts, mean_ns),
        evaluation=_bubbles(evaluations, [group[0].start_ns for group in evaluations], None),
    )


def write_cycles(path: Path, cycles: Sequence[RankCycle]) -> None:
    """Write the cycles of all ranks as one JSON file."""
    write_text(path, Cycles(ranks=list(cycles)).model_dump_json(indent=2) + "\n")


def _evaluation_groups(bubbles: Sequence[Bubble]) -> list[list[Bubble]]:
    ordered = sorted(
        (bubble for bubble in bubbles if bubble.forward_only and bubble.index >= 0), key=lambda bubble: bubble.start_ns
    )
    groups = [ordered[:1]] if ordered else []
    for previous, bubble in pairwise(ordered):
        if bubble.index <= previous.index or bubble.iteration != previous.iteration:
            groups.append([])
        groups[-1].append(bubble)
    return groups


def _most_common(groups: list[list[Bubble]]) -> list[list[Bubble]]:
    if not groups:
        return []
    length = Counter(map(len, groups)).most_common(1)[0][0]
    return [sorted(group, key=lambda bubble: bubble.start_ns) for group in groups if len(group) == length]


def _bubbles(groups: list[list[Bubble]], starts: list[int], iteration_ns: float | None) -> list[CycleBubble]:
    cycle = []
    for index, column in enumerate(zip(*groups, strict=True)):
        durations = np.array([bubble.duration_ns for bubble in column]) / _MS
        offsets = [bubble.start_ns - start for bubble, start in zip(column, starts, strict=True)]
        p10, p50, p90 = np.percentile(durations, [10, 50, 90])
        mean = float(durations.mean())
        cycle.append(
            CycleBubble(
                index=index,
                kind=Counter(bubble.kind for bubble in column).most_common(1)[0][0],
                mean_ms=mean,
                median_ms=float(p50),
                p10_ms=float(p10),
                p90_ms=float(p90),
                offset_ms=float(np.median(offsets)) / _MS,
                share=mean * _MS / iteration_ns if iteration_ns else None,
                free_bytes=min(bubble.free_bytes for bubble in column),
                count=len(column),
            )
        )
    return cycle
