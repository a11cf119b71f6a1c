"""What was last written into a ring buffer of rows."""

from __future__ import annotations

from collections.abc import Iterator


def recent(ring: memoryview, width: int, count: int, most: int) -> Iterator[tuple[int, ...]]:
    """The rows of a ring buffer that were written last, oldest first."""
    rows = len(ring) // width
    for row in range(max(0, count - min(rows, most)), count):
        at = row % rows * width
        yield tuple(ring[at : at + width])
