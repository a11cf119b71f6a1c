"""Prediction of a bubble's end, from the bubbles at the same position in earlier iterations.

A pipeline's schedule is static, so its bubbles repeat, with noise.  There are two predictions: a shortest duration,
which errs on the early side, and the times by which the bubble has ended in one of eight cases, in two, and so on.  A
step in flight at the bubble's end delays the training by half of the step on average, while an unused tail only wastes
that tail.  So the latest start of a step depends on its duration and on the allowed overrun (``OpenBubble.window``).

A bubble begins when this rank is done and ends when another rank is, so both add noise to its duration.  If the other
rank varies less, the end is predicted better from the end of the bubble before, when the two last synchronised.  Both
are computed, and the one that varies less is used.

After a save or an evaluation, ranks do not begin a cycle together as they do otherwise, so its bubbles may be shorter.
Such a cycle is learnt from apart, and a bubble in it is expected to last as long as the shortest of the last ones there
and of the usual prediction, whichever is shorter; no step may run on after that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from itertools import islice
from math import log, sqrt
from typing import NamedTuple

from megatron.fill.rank.rule import FillRule
from megatron.fill.types import BubbleKind, CycleKey

_FEWEST_AFTER = 3  # disturbed cycles of a sort from which the next one is predicted
_FOR_CASES = 0.8  # part of the allowed overrun for ends after the shortest duration; a few ends come before it
_LAST_AFTER = 5  # number of them that count
ENOUGH_TO_PLAN = 5  # number of observations of each bubble that suffice for a plan
CASES = 8  # number of equal parts into which the recent durations are divided
_QUANTILE = 0.1  # quantile of the recent durations on which the shortest duration is based
_TOLERANCE = 1.3  # factor by which a duration differs from the prediction in a change of the cycle, and not in noise


class Forecast(NamedTuple):
    """The prediction for a bubble that opens now, in ns from now."""

    shortest_ns: int = 0  # duration that it reaches with some confidence; 0 if unknown
    # Times by which it has ended in 1, 2 ... ``CASES`` of ``CASES`` cases; empty if they are not reliable.
    ends_ns: tuple[int, ...] = ()
    # For each of these cases, the longest step that the end may catch; empty if it may catch none.
    steps_ns: tuple[int, ...] = ()
    fills: bool = False  # True if it is worth filling


_UNKNOWN = Forecast()


class BubblePredictor:
    """Predicts when one rank's bubbles end, per cycle and position in it."""

    def __init__(self, rule: FillRule) -> None:
        self.rule = rule
        self.overrun = rule.overrun / rule.stages  # set to 0 by the listener after braking
        self._cycles: dict[CycleKey, _Cycle] = {}
        self._cycle = _Cycle()
        self._learning = False
        self._met_ns = 0
        # The last bubbles of disturbed cycles, in ns: by cycle, by what disturbed it, by kind and position.
        self._afters: defaultdict[tuple[object, ...], deque[int]] = defaultdict(lambda: deque(maxlen=_LAST_AFTER))
        self._present: tuple[object, ...] = ()  # the present cycle, and what disturbed it

    def cycle_started(self, key: CycleKey, now_ns: int, after: frozenset[str] = frozenset()) -> None:
        """Begin a cycle, to which the bubbles observed next belong; ``after``: what disturbed it, if anything."""
        before, cycle = self._cycle, self._cycles.setdefault(key, _Cycle())
        cycle.started(now_ns, before is cycle and self._learning, self.rule)
        self._cycle = cycle
        self._learning = not after
        self._present = key, after
        self._met_ns = now_ns

    def iteration_skipped(self) -> None:
        """Note an iteration whose cycle is not reported, so the next cycle does not follow the latest one."""
        self._cycle = _Cycle()

    def forecast(self, kind: BubbleKind, index: int, now_ns: int) -> Forecast:
        """Return the prediction for the bubble that opens now."""
        cycle, rule = self._cycle, self.rule
        if index >= len(cycle.histories):
            return _UNKNOWN
        history = cycle.histories[index]
        if history.kind is not kind or history.seen < rule.warmup:
            return _UNKNOWN
        shortest_ns, ends_ns = history.predict(now_ns - self._met_ns, rule)
        shortest_ns = max(0, shortest_ns)
        if not self._learning:
            # The shortest of the last ones in cycles disturbed like this one; 0 if there are too few of them.
            last_ns = self._afters[*self._present, kind, index]
            shortest_ns = min(shortest_ns, *last_ns) if len(last_ns) >= _FEWEST_AFTER else 0
            return Forecast(shortest_ns, fills=shortest_ns >= rule.min_bubble_ns)
        usual_ns = max(0, sum(ends_ns)) // CASES
        if not ends_ns or usual_ns < rule.min_bubble_ns:
            return Forecast(shortest_ns, fills=shortest_ns >= rule.min_bubble_ns)
        steps_ns = self._longest_steps(shortest_ns, ends_ns)
        return Forecast(shortest_ns, ends_ns, steps_ns, fills=any(steps_ns) or shortest_ns >= rule.min_bubble_ns)

    def _longest_steps(self, shortest_ns: int, ends_ns: tuple[int, ...]) -> tuple[int, ...]:
        """Return for each case the longest step that the end may catch; empty if it may catch none.

        To fill the stretch between two ends gains that stretch, in all the cases that last longer, and costs half a
        step in the case that ends in it: as much in each stretch, of whichever bubble.  So steps of one length are
        allowed in the stretches of the cycle that gain most, in as many as the allowed overrun pays for.
        """
        cycle, rule = self._cycle, self.rule
        allowed_ns = 2 * CASES * _FOR_CASES * self.overrun * cycle.period_ns
        gains, most = cycle.gains, cycle.most
        count = len(most) if allowed_ns else 0
        steps_ns: list[int] = []
        before_ns, weight = shortest_ns, 2 * CASES + 1
        for end_ns in ends_ns:
            weight -= 2
            step_ns = 0
            if end_ns > before_ns:
                gain = (end_ns - before_ns) * weight  # times 2 ``CASES``
                before_ns = end_ns
                gains.append(gain)
                if count:
                    longest_ns = allowed_ns / (count - bisect_left(most, gain) or 1)
                    longest_ns = among_replicas(longest_ns, rule.replicas, cycle.scale_ns)
                    step_ns = gain if gain < longest_ns else int(longest_ns)  # a longer one fills less than it runs on
            steps_ns.append(step_ns)
        return tuple(steps_ns) if count else ()

    def expected(self) -> list[tuple[BubbleKind, int]]:
        """Return the bubbles of the present cycle with their low durations in ns; empty if the cycle is too new.

        A plan needs fewer observations than filling, and no margin: a wrong plan does not delay the training, since
        the worker checks the bubble before each step.  Bubbles that occur in fewer than half of the iterations are
        left out.
        """
        histories = self._cycle.histories
        cycles = max((history.seen for history in histories), default=0)
        if cycles < min(ENOUGH_TO_PLAN, self.rule.warmup):
            return []
        usual = [history for history in histories if 2 * history.seen >= cycles]
        return [(history.kind, max(0, history.from_opening.low()[0])) for history in usual]

    def observe(self, kind: BubbleKind, index: int, start_ns: int, end_ns: int) -> None:
        """Learn from a bubble's start and end."""
        met_ns, self._met_ns = self._met_ns, end_ns
        if not self._learning:
            self._afters[*self._present, kind, index].append(end_ns - start_ns)
            return
        histories = self._cycle.histories
        if index > len(histories):
            return
        if index == len(histories):
            histories.append(_History(kind))
        history = histories[index]
        if history.kind is not kind:  # the order of bubbles has changed, so the histories no longer apply
            del histories[index + 1 :]
            history = histories[index] = _History(kind)
        history.add(end_ns - start_ns, end_ns - met_ns, self.rule)


def among_replicas(step_ns: float, replicas: int, scale_ns: float) -> float:
    """Return the longest step that may be caught in each replica, so that the whole iteration is delayed by no more.

    An iteration of R replicas takes as long as the slowest.  If they vary independently, that maximum is nearly Gumbel
    distributed, and a delay of mean d and variance v in every replica makes it longer by d + v / (2 scale): most
    delays are hidden behind a replica that was late anyway.  A step of length L that is in flight at the end runs on
    for 0 to L, so v = (2/3) L d, and steps of length L may be caught in as many cases as make d (1 + L / (3 scale)) the
    delay that is allowed.  The tensor-parallel ranks of one replica share the end of a bubble; the latest of them is
    late by at most twice the mean.

    Args:
        step_ns: the longest step for a single replica.
        scale_ns: scale of the distribution of iteration times; with 0 the delays of all replicas add up.
    """
    if replicas == 1:
        return step_ns
    latest_ns = step_ns / 2
    grows = 1 / (3 * scale_ns) if scale_ns > 0 else 0.0  # L (1 + grows L) is the step that is allowed
    hidden_ns = (sqrt(1 + 4 * grows * latest_ns) - 1) / (2 * grows) if grows else 0.0
    return max(hidden_ns, step_ns / replicas)


class _Cycle:
    """The history of one cycle of bubbles."""

    __slots__ = ("_last", "_periods", "_start_ns", "gains", "histories", "most", "period_ns", "scale_ns")

    def __init__(self) -> None:
        self.histories: list[_History] = []  # of each position
        self.period_ns = 0  # shortest recent time from start to start; 0 if unknown
        self.scale_ns = 0.0  # of the Gumbel distribution that fits the lower part of the periods; 0 without spread
        # Gains of the stretches of the present cycle's bubbles so far (``BubblePredictor._longest_steps``).
        self.gains: list[int] = []
        # Those of one of the last two cycles, in ascending order: of the one with more, since a cycle after a delay has
        # fewer bubbles that are predicted.
        self.most: list[int] = []
        self._last: list[int] = []
        self._periods = _Window()
        self._start_ns = 0

    def started(self, now_ns: int, follows: bool, rule: FillRule) -> None:
        if follows:
            self._periods.add(now_ns - self._start_ns, rule.window)
            self.period_ns = min(islice(reversed(self._periods.recent), ENOUGH_TO_PLAN))
            # Between its quantile p and its median lie log(log(1/p) / log(2)) scales.  The upper part is not used:
            # occasional stalls of a training are not noise of its replicas.
            self.scale_ns = self._periods.low()[1] / log(log(1 / _QUANTILE) / log(2))
        self._start_ns = now_ns
        if self.gains:
            self.gains.sort()
            self.most = max(self.gains, self._last, key=len)
            self._last, self.gains = self.gains, []


class _Window:
    """A sliding window of recent values, in order of time and of size."""

    __slots__ = ("ordered", "recent")

    def __init__(self) -> None:
        self.recent: deque[int] = deque()
        self.ordered: list[int] = []

    def add(self, value: int, most: int) -> None:
        self.recent.append(value)
        insort(self.ordered, value)
        while len(self.recent) > most:
            del self.ordered[bisect_left(self.ordered, self.recent.popleft())]

    def low(self) -> tuple[int, int]:
        """Return the low quantile of the values, and their spread (median less the quantile)."""
        ordered = self.ordered
        base = ordered[int(_QUANTILE * (len(ordered) - 1))]
        return base, ordered[len(ordered) // 2] - base

    def cases(self, less_ns: int) -> tuple[int, ...]:
        """Return the quantiles at 1, 2 ... ``CASES`` parts of ``CASES``, each less ``less_ns``."""
        last = len(self.ordered) - 1
        return tuple([self.ordered[last * part // CASES] - less_ns for part in range(1, CASES + 1)])


class _History:
    """The recent bubbles at one position of the cycle."""

    __slots__ = ("from_meeting", "from_opening", "kind", "seen", "shortened_to_ns", "surprises", "usual_ns")

    def __init__(self, kind: BubbleKind) -> None:
        self.kind = kind
        self.seen = 0
        self.surprises = 0
        self.usual_ns = 0
        self.shortened_to_ns: int | None = None
        self.from_opening = _Window()  # times from its opening to its end
        self.from_meeting = _Window()  # times from the end of the bubble before (or the cycle's start) to its end

    def predict(self, since_meeting_ns: int, rule: FillRule) -> tuple[int, tuple[int, ...]]:
        """Return the shortest duration and the end times by case (``Forecast``), in ns."""
        recent, since_ns = self.from_opening, 0
        duration_ns, spread = recent.low()
        other_ns, other_spread = self.from_meeting.low()
        if other_spread < 0.9 * spread:
            recent, since_ns = self.from_meeting, since_meeting_ns
            duration_ns, spread = other_ns - since_ns, other_spread
        duration_ns -= int(rule.margin * spread)
        self.usual_ns = duration_ns
        if self.shortened_to_ns is not None:
            return min(duration_ns, self.shortened_to_ns), ()
        return duration_ns, recent.cases(since_ns)

    def add(self, duration_ns: int, since_meeting_ns: int, rule: FillRule) -> None:
        self.seen += 1
        # Suddenly shorter: used at once, since overruns harm the training.
        self.shortened_to_ns = duration_ns if duration_ns * _TOLERANCE < self.usual_ns else None
        # Suddenly longer: used after three in a row, since old durations only make the prediction too short.  Longer
        # than nearly all: where durations are spread widely, three in a row above the lower ones are no change.
        ordered = self.from_opening.ordered
        high_ns = ordered[(len(ordered) - 1) * (CASES - 1) // CASES] if ordered else 0
        self.surprises = self.surprises + 1 if 0 < high_ns * _TOLERANCE < duration_ns else 0
        most = rule.window
        if self.surprises >= 3:
            self.surprises, most = 0, 3
        self.from_opening.add(duration_ns, most)
        self.from_meeting.add(since_meeting_ns, most)
