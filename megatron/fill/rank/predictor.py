"""When will this bubble end?  Answered from the bubbles at the same place of earlier iterations.

A pipeline's schedule is static, so its bubbles repeat; what varies is noise.  Two answers are given: how long a bubble
lasts at least, which leans to the early side, and when it ends in one case of eight, in two, and so on.  A step caught
in flight by the bubble's end delays the main job by half of it on average, an unused tail only wastes a tail.  So how
late a step may begin depends on how long it is and on what overruns may cost (``OpenBubble.window``).

A bubble begins when this rank is done and ends when another one is, so both add to the noise of its length.  Where
the other rank is the steadier one, the end is told better from the end of the bubble before, when the two last met.
Both are tried, and the steadier one is used.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from itertools import islice
from math import log, sqrt
from typing import NamedTuple

from megatron.fill.rank.rule import FillRule
from megatron.fill.types import BubbleKind, CycleKey

ENOUGH_TO_PLAN = 5  # observations of each bubble
CASES = 8  # into how many equal parts the recent durations are divided


class Forecast(NamedTuple):
    """What is known of a bubble that opens now, in ns from now.

    Attributes:
        shortest_ns: how long it will last at least, with some confidence; 0 if unknown.
        ends_ns: by when it has ended in 1, 2 ... ``CASES`` of as many cases; empty if that is not to be relied on.
        overrun_ns: by how much steps may run on after its end, in expectation.
        fills: whether it is worth filling.
    """

    shortest_ns: int = 0
    ends_ns: tuple[int, ...] = ()
    overrun_ns: int = 0
    fills: bool = False

    def told(self, from_ns: int) -> tuple[int, tuple[int, ...]]:
        """The deadline and the ends that the gate tells, for a bubble that opens at ``from_ns``."""
        return from_ns + self.shortest_ns, tuple([from_ns + end_ns for end_ns in self.ends_ns])


_UNKNOWN = Forecast()


class BubblePredictor:
    """Predicts when one rank's bubbles end, per cycle and position in it."""

    def __init__(self, rule: FillRule) -> None:
        self.rule = rule
        self.overrun = rule.overrun / rule.stages  # may be taken back while it runs
        self._cycles: dict[CycleKey, _Cycle] = {}
        self._cycle = _Cycle()
        self._learning = False
        self._met_ns = 0

    def cycle_started(self, key: CycleKey, now_ns: int, disturbed: bool = False) -> None:
        """The bubbles observed next belong to ``key``.

        A ``disturbed`` cycle (after an evaluation or a checkpoint) is neither predicted nor learnt from: its first
        bubbles wait for something else than the other stages.
        """
        before, cycle = self._cycle, self._cycles.setdefault(key, _Cycle())
        cycle.started(now_ns, before is cycle and self._learning, self.rule)
        self._cycle = cycle
        self._learning = not disturbed
        self._met_ns = now_ns

    def iteration_skipped(self) -> None:
        """An iteration begins whose cycle is not told: the next one does not follow the last one."""
        self._cycle = _Cycle()

    def forecast(self, kind: BubbleKind, index: int, now_ns: int) -> Forecast:
        """What is known of the bubble that opens now."""
        cycle, rule = self._cycle, self.rule
        if not self._learning or index >= len(cycle.histories):
            return _UNKNOWN
        history = cycle.histories[index]
        if history.kind is not kind or history.seen < rule.warmup:
            return _UNKNOWN
        shortest_ns, ends_ns = history.predict(now_ns - self._met_ns, rule)
        shortest_ns = max(0, shortest_ns)
        usual_ns = max(0, sum(ends_ns)) // CASES
        share_ns = self.overrun * cycle.period_ns * cycle.share(usual_ns)
        overrun_ns = int(among_replicas(share_ns, rule.replicas, cycle.scale_ns(rule)))
        if usual_ns >= rule.min_bubble_ns:
            cycle.weight += sqrt(usual_ns)
        fills = (usual_ns if overrun_ns else shortest_ns) >= rule.min_bubble_ns
        return Forecast(shortest_ns, ends_ns, overrun_ns, fills)

    def expected(self) -> list[tuple[BubbleKind, int]]:
        """The bubbles of the present cycle with the durations that can be counted on, in ns; empty if it is too new.

        A few observations do for a plan, and no margin: a plan that is wrong delays nobody, for the worker asks before
        each step.  To fill by, ``warmup`` many are asked for.  Bubbles that come in fewer than half of the iterations
        are left out.
        """
        histories = self._cycle.histories
        cycles = max((history.seen for history in histories), default=0)
        if cycles < min(ENOUGH_TO_PLAN, self.rule.warmup):
            return []
        usual = [history for history in histories if 2 * history.seen >= cycles]
        return [(history.kind, max(0, history.from_opening.low(self.rule)[0])) for history in usual]

    def observe(self, kind: BubbleKind, index: int, start_ns: int, end_ns: int) -> None:
        """Learn when the bubble began and ended."""
        met_ns, self._met_ns = self._met_ns, end_ns
        histories = self._cycle.histories
        if not self._learning or index > len(histories):
            return
        if index == len(histories):
            histories.append(_History(kind))
        history = histories[index]
        if history.kind is not kind:  # the order of the bubbles changed: what was learnt belongs to another cycle
            del histories[index + 1 :]
            history = histories[index] = _History(kind)
        history.add(end_ns - start_ns, end_ns - met_ns, self.rule)


def among_replicas(overrun_ns: float, replicas: int, scale_ns: float) -> float:
    """By how much the steps of one replica may run on, so that waiting for the latest costs no more than this.

    An iteration of R replicas is the longest of R.  Where each varies by itself, that maximum is nearly Gumbel
    distributed, and a delay of mean d and variance v in every replica makes it longer by d + v / (2 scale): most
    delays are hidden behind a replica that was late anyhow.  A step of length L that is caught runs on for 0 to L, so
    v = (2/3) L d, and no step is caught that is longer than 2 ``CASES`` d (``OpenBubble.window``).  The tensor-parallel
    ranks of one replica are caught by the same end of a bubble: there the latest of them is late by twice the mean at
    most.

    Args:
        overrun_ns: what all of it may cost.
        scale_ns: of the distribution of the iterations' times; with 0 the delays of all add up.
    """
    if replicas == 1:
        return overrun_ns
    latest_ns = overrun_ns / 2
    grows = 2 * CASES / (3 * scale_ns) if scale_ns > 0 else 0.0  # d (1 + grows d) is what it costs
    hidden_ns = (sqrt(1 + 4 * grows * latest_ns) - 1) / (2 * grows) if grows else 0.0
    return max(hidden_ns, overrun_ns / replicas)


class _Cycle:
    """What is known of one cycle of bubbles.

    Attributes:
        period_ns: how long it took of late at least, from start to start; 0 if unknown.
        weight: of its bubbles that were worth filling, so far: the roots of how long they usually are.
    """

    __slots__ = ("_periods", "_start_ns", "_whole", "histories", "period_ns", "weight")

    def __init__(self) -> None:
        self.histories: list[_History] = []
        self.period_ns = 0
        self.weight = self._whole = 0.0
        self._periods = _Window()
        self._start_ns = 0

    def started(self, now_ns: int, follows: bool, rule: FillRule) -> None:
        if follows:
            self._periods.add(now_ns - self._start_ns, rule.window)
            self.period_ns = min(islice(reversed(self._periods.recent), ENOUGH_TO_PLAN))
        self._start_ns = now_ns
        self._whole, self.weight = self.weight, 0.0

    def scale_ns(self, rule: FillRule) -> float:
        """The scale of the Gumbel distribution with the lower part of the periods; 0 where they do not vary.

        Between its quantile ``p`` and its median lie log(log(1/p) / log(2)) scales.  Of the upper part nothing is
        said: what holds a training up now and then is no noise of its replicas.
        """
        if not self._periods.ordered:
            return 0.0
        return self._periods.low(rule)[1] / log(log(1 / rule.quantile) / log(2))

    def share(self, usual_ns: int) -> float:
        """Of what overruns may cost in a cycle, what a bubble gets that is usually so long.

        A long bubble has more to gain from its share, but a short one needs no less to gain anything; in between lies
        the root.  Until the weight of a whole cycle is known, there is nothing to share out.
        """
        return sqrt(usual_ns) / max(sqrt(usual_ns), self._whole) if self._whole else 0.0


class _Window:
    """The recent values of something, in order of time and of size."""

    __slots__ = ("ordered", "recent")

    def __init__(self) -> None:
        self.recent: deque[int] = deque()
        self.ordered: list[int] = []

    def add(self, value: int, most: int) -> None:
        self.recent.append(value)
        insort(self.ordered, value)
        while len(self.recent) > most:
            del self.ordered[bisect_left(self.ordered, self.recent.popleft())]

    def low(self, rule: FillRule) -> tuple[int, int]:
        """The value that few are below, and the spread of the values."""
        ordered = self.ordered
        base = ordered[int(rule.quantile * (len(ordered) - 1))]
        spread = ordered[len(ordered) // 2] - base
        return base, spread

    def cases(self, less_ns: int) -> tuple[int, ...]:
        """The values that are the highest in 1, 2 ... ``CASES`` of as many equal parts, each less so much."""
        last = len(self.ordered) - 1
        return tuple([self.ordered[last * part // CASES] - less_ns for part in range(1, CASES + 1)])


class _History:
    """The recent bubbles at one position of the cycle."""

    __slots__ = ("cap_ns", "from_meeting", "from_opening", "kind", "seen", "surprises", "usual_ns")

    def __init__(self, kind: BubbleKind) -> None:
        self.kind = kind
        self.seen = 0
        self.surprises = 0
        self.usual_ns = 0
        self.cap_ns: int | None = None
        self.from_opening = _Window()  # from its own opening to its end
        self.from_meeting = _Window()  # from the end of the bubble before (or the start of the cycle) to its end

    def predict(self, since_meeting_ns: int, rule: FillRule) -> tuple[int, tuple[int, ...]]:
        """How long the bubble lasts at least, and by when it has ended in how many cases."""
        recent, since_ns = self.from_opening, 0
        duration_ns, spread = recent.low(rule)
        other_ns, other_spread = self.from_meeting.low(rule)
        if other_spread < 0.9 * spread:
            recent, since_ns = self.from_meeting, since_meeting_ns
            duration_ns, spread = other_ns - since_ns, other_spread
        duration_ns -= int(rule.margin * spread)
        self.usual_ns = duration_ns
        if self.cap_ns is not None:
            return min(duration_ns, self.cap_ns), ()
        return duration_ns, recent.cases(since_ns)

    def add(self, duration_ns: int, since_meeting_ns: int, rule: FillRule) -> None:
        self.seen += 1
        # Suddenly shorter: believe it at once, for overrunning is what harms.
        self.cap_ns = duration_ns if duration_ns * rule.tolerance < self.usual_ns else None
        # Suddenly longer: believe it after three in a row, for the old durations only hold the prediction down.
        self.surprises = self.surprises + 1 if 0 < self.usual_ns * rule.tolerance < duration_ns else 0
        most = rule.window
        if self.surprises >= 3:
            self.surprises, most = 0, 3
        self.from_opening.add(duration_ns, most)
        self.from_meeting.add(since_meeting_ns, most)
