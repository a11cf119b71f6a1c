"""Pairs of ranks that are measured together: none that could disturb each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product, zip_longest

type Pair = tuple[int, int]


def rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """A round-robin tournament: every unordered pair of ranks, whose ``hosts`` are given, in one round.

    In a round a host takes part in one pair, as one end of it or both: its uplink, and what its ranks share inside
    (loopback, PCIe, NVLink), carry one message at a time.  With g ranks on each of n hosts it takes
    g * g * (n - 1) + g * (g - 1) / 2 rounds (n for n - 1 if n is odd); for even n none can take fewer, as
    that many pairs have an end on one host.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    names = list(ranks)
    matches = [[list(combinations(ranks[name], 2)) for name in names]]
    matches += [[list(product(ranks[a], ranks[b])) for a, b in day] for day in _days(names)]
    return [
        [(min(pair), max(pair)) for pair in together if pair is not None]
        for day in matches
        for together in zip_longest(*day)
    ]


def _days(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Each name meets each other once; by the circle method, in which one stays and the others move on."""
    circle: list[str | None] = [*names, None] if len(names) % 2 else list(names)
    days = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        days.append([(a, b) for a, b in met if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return days
