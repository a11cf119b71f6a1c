"""The choice of the ranks to draw: all ranks of a small run, one replica's stages of a large one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.fill.report.build import SegmentSums
from megatron.fill.types import RankInfo

MANY = 16  # ranks, above which they are not drawn or listed one by one


@dataclass(frozen=True, slots=True)
class Drawn:
    """The segment and the ranks that the picture and the trace show, by their numbers."""

    segment: int
    ranks: tuple[int, ...]
    what: str  # description of the ranks, such as ``data-parallel rank 3 of 128``; empty if all ranks are drawn


def choose_drawn(segments: Mapping[int, SegmentSums]) -> Drawn | None:
    """Choose the last segment in which jobs ran, or else the last one with iterations; None if there is none.

    Of a segment with more than ``MANY`` ranks, one replica (the ranks with equal data- and tensor-parallel ranks) is
    drawn: the one that harvested the most.
    """
    worth = [
        (any(sums.harvested.values()), number) for number, sums in segments.items() if any(sums.iterations.values())
    ]
    if not worth:
        return None
    number = max(worth)[1]
    sums = segments[number]
    if len(sums.infos) <= MANY:
        return Drawn(number, tuple(sorted(info.rank for info in sums.infos)), "")
    replicas: dict[tuple[int, int], list[RankInfo]] = {}
    for info in sorted(sums.infos, key=lambda info: info.rank):
        replicas.setdefault((info.data_parallel_rank, info.tensor_parallel_rank), []).append(info)
    place, infos = max(replicas.items(), key=lambda one: sum(sums.harvested[info.rank] for info in one[1]))
    stages: dict[int, int] = {}
    for info in infos:  # the first rank of each stage; context parallelism has several
        stages.setdefault(info.stage, info.rank)
    return Drawn(number, tuple(sorted(stages.values())), _what(place, list(replicas)))


def _what(place: tuple[int, int], places: list[tuple[int, int]]) -> str:
    parts = []
    for at, name in enumerate(("data", "tensor")):
        several = len({one[at] for one in places})
        if several > 1:
            parts.append(f"{name}-parallel rank {place[at]} of {several}")
    return ", ".join(parts)
