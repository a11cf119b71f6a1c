"""Arithmetic on the bars of a picture."""

from __future__ import annotations

from collections.abc import Iterable

type Bar = tuple[float, float]  # start and width


def subtract(bars: Iterable[Bar], taken: Iterable[Bar]) -> list[Bar]:
    """Subtract the intervals in ``taken`` from ``bars``."""
    holes = sorted((start, start + width) for start, width in taken)
    rest = []
    for start, width in bars:
        at, end = start, start + width
        for hole_start, hole_end in holes:
            if at < hole_start < end:
                rest.append((at, hole_start - at))
            if hole_start < end:
                at = max(at, hole_end)
        if at < end:
            rest.append((at, end - at))
    return rest


def join(bars: Iterable[Bar], gap: float) -> list[Bar]:
    """Merge narrow bars (below ``3 * gap``) into the bar before them where less than ``gap`` separates the two."""
    joined: list[Bar] = []
    for start, width in sorted(bars):
        if joined and width < 3 * gap and start - sum(joined[-1]) < gap:
            begin = joined[-1][0]
            joined[-1] = (begin, start + width - begin)
        else:
            joined.append((start, width))
    return joined
