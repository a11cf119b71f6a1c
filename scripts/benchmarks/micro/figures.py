"""What is kept of many measured values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from megatron.fill.trial.steptimes import nearest_rank


def spread(values: Sequence[float]) -> dict[str, float]:
    """Their number, median, 99th percentile (nearest rank) and extremes; of none, the number."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    found = {
        "count": len(ordered),
        "min": ordered[0],
        "p50": nearest_rank(ordered, 0.5),
        "p99": nearest_rank(ordered, 0.99),
    }
    return {name: round(value, 3) for name, value in (found | {"max": ordered[-1]}).items()}


def delays_us(begins_ns: Sequence[int], ends_ns: Sequence[int]) -> list[float]:
    """From each begin to its end, in us.

    Raises:
        ValueError: there are not as many of both.
    """
    return [(end - begin) / 1e3 for begin, end in zip(begins_ns, ends_ns, strict=True)]


def followed_us(begins_ns: Sequence[int], ends_ns: Sequence[int]) -> list[float]:
    """From each begin to the first end after it, in us, if there is one before the next begin; both in order."""
    found: list[float] = []
    used = -1
    for end in ends_ns:
        last = bisect_right(begins_ns, end) - 1
        if last > used:
            used = last
            found.append((end - begins_ns[last]) / 1e3)
    return found
