"""Harm that no fault may do to the training: a stop of seconds, or a lasting slowdown."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import mean, median

from megatron.fill.types import Iteration
from tests.chaos import measure
from tests.chaos.campaign import Findings, Stretch

_STALL_NS = 2_000_000_000  # beyond what an iteration usually takes
_MANY, _ENOUGH = 100, 25  # iterations to compare over; fewer than the latter tell nothing
_MOST = 0.05


@dataclass(frozen=True, slots=True)
class Stall:
    """An iteration that took much too long.

    Attributes:
        kinds: kinds of the faults that began during it or up to 5 s before it.
    """

    iteration: int
    seconds: float
    kinds: tuple[str, ...]


def stalls(findings: Findings, seen: Sequence[Iteration]) -> list[Stall]:
    """The iterations that took two seconds more than the longest one of a quiet window usually does."""
    if not seen:
        return []
    quiet = [max(values) for one in findings.windows if not one.faults and (values := _inside(one, seen))]
    usual_ns = median(quiet or [_ns(one) for one in seen])
    return [
        Stall(one.iteration, _ns(one) / 1e9, tuple(sorted(measure.blamed(findings, one.end_ns, 5 + _ns(one) / 1e9))))
        for one in seen
        if _ns(one) > usual_ns + _STALL_NS
    ]


def longest_s(findings: Findings, seen: Sequence[Iteration]) -> dict[str, float]:
    """The longest iteration that overlaps a fault of each kind, in seconds."""
    starts, ends = [one.start_ns for one in seen], [one.end_ns for one in seen]
    found: defaultdict[str, float] = defaultdict(float)
    for kind, start_ns, end_ns in measure.stretches(findings):
        for one in seen[bisect_left(ends, start_ns) : bisect_left(starts, end_ns)]:
            found[kind] = max(found[kind], _ns(one) / 1e9)
    return dict(found)


@dataclass(frozen=True, slots=True)
class Slowed:
    """The slowdown of iterations after faults of one kind.

    Attributes:
        mean: slowdown of up to 100 iterations from the fault on, against the slower of the neighbouring quiet windows;
            0.01 is 1%.
        noise: relative difference between the slowest and the fastest quiet window of the run; infinite with fewer than
            two.
    """

    mean: float
    noise: float

    @property
    def beyond(self) -> bool:
        """True if the slowdown is more than 5% plus the run's noise, which the machine's other work may cause."""
        return self.mean > _MOST + self.noise


def slowed(findings: Findings, seen: Sequence[Iteration]) -> dict[str, Slowed]:
    """The slowdown of the next 100 iterations for each kind: the median over its faults.

    Other faults of the same window are included; a run with one kind alone shows the effect of that kind.
    """
    found: defaultdict[str, list[Slowed]] = defaultdict(list)
    windows = findings.windows
    means = [mean(values) for one in windows if not one.faults and len(values := _inside(one, seen)) >= _ENOUGH]
    noise = (max(means) - min(means)) / min(means) if len(means) > 1 else inf
    for kind, start_ns, _ in measure.stretches(findings):
        at = next((n for n, one in enumerate(windows) if one.faults and one.start_ns <= start_ns <= one.end_ns), None)
        if at is None or windows[at].alone:
            continue
        quiet = [_inside(one, seen) for one in windows[max(0, at - 1) : at + 2] if not one.faults]
        base = [mean(values) for values in quiet if len(values) >= _ENOUGH]
        after = [
            ns for one in seen if start_ns <= one.start_ns and one.end_ns <= windows[at].end_ns for ns in [_ns(one)]
        ]
        if base and len(after) >= _ENOUGH:
            found[kind].append(Slowed(mean(after[:_MANY]) / max(base) - 1, noise))
    return {kind: sorted(ones, key=lambda one: one.mean)[len(ones) // 2] for kind, ones in found.items()}


def _inside(window: Stretch, seen: Sequence[Iteration]) -> list[int]:
    return [_ns(one) for one in seen if window.start_ns <= one.start_ns and one.end_ns <= window.end_ns]


def _ns(one: Iteration) -> int:
    return one.end_ns - one.start_ns
