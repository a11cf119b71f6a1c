"""The latest rows of a ring buffer."""

from __future__ import annotations

from collections.abc import Iterator


def recent(ring: memoryview, width: int, count: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the latest ``most`` rows of a ring buffer, oldest first.

    Args:
        ring: words of the ring, in rows of ``width``.
        count: number of rows written so far.
    """
    rows = len(ring) // width
    for row in range(max(0, count - min(rows, most)), count):
        at = row % rows * width
        yield tuple(ring[at : at + width])
