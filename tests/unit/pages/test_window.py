"""When a step may begin in a bubble whose end is known in eighths only."""

from __future__ import annotations

import random

from hypothesis import example, given
from hypothesis import strategies as st

from megatron.fill.pages.gate import OpenBubble

MS = 1_000_000
NEVER_MS = (1 << 62) / MS
EVENLY = tuple(n * 10 * MS for n in range(1, 9))  # ends after 10, 20 ... 80 ms


def bubble(deadline_ms: float, ends_ns: tuple[int, ...], *steps_ms: float) -> OpenBubble:
    """One that opens at 0; ``steps_ms``: the longest step that each of the eight ends may catch."""
    return OpenBubble(1, 0, int(deadline_ms * MS), 0, False, ends_ns, tuple(int(step * MS) for step in steps_ms))


def window_ms(told: OpenBubble, step_ms: float, now_ms: float = 0, pause_ms: float = 0) -> tuple[float, float]:
    begin_ns, end_ns = told.window(int(step_ms * MS), int(now_ms * MS), int(pause_ms * MS))
    return begin_ns / MS, end_ns / MS


def test_the_longer_a_step_the_fewer_bubbles_may_catch_it():
    told = bubble(9, EVENLY, 16, 8, 6, 4, 3.2, 2.7, 2.3, 2)
    assert window_ms(told, 2) == (0, NEVER_MS)
    assert window_ms(told, 4) == (0, 40)
    assert window_ms(told, 8) == (0, 20)
    assert window_ms(told, 9) == (0, 10)
    assert window_ms(bubble(25, EVENLY, 16, 8, 6, 4, 3.2, 2.7, 2.3, 2), 20) == (0, 25)


def test_nothing_is_filled_beyond_the_deadline_where_no_step_may_be_caught_or_the_ends_are_unknown():
    assert window_ms(bubble(9, EVENLY, *[0] * 8), 2) == (0, 9)
    assert window_ms(bubble(9, ()), 2) == (0, 9)
    assert window_ms(bubble(9, EVENLY, *[100] * 8), 0) == (0, 9)  # a step of which nothing is known


def test_where_most_bubbles_are_short_a_step_waits_until_they_have_ended():
    mostly_short = (MS // 10, MS // 5, MS // 2, MS, 90 * MS, 95 * MS, 99 * MS, 120 * MS)
    assert window_ms(bubble(0, mostly_short, 0, 0, 0, 0, 9, 3, 2, 4), 2) == (1, NEVER_MS)
    assert window_ms(bubble(0, mostly_short, 0, 0, 0, 0, 9, 3, 2, 4), 3) == (1, 95)


def test_where_bubbles_end_either_soon_or_much_later_steps_pause_when_many_end():
    told = bubble(
        30, (31 * MS, 32 * MS, 33 * MS, 34 * MS, 90 * MS, 91 * MS, 120 * MS, 200 * MS), 0, 0, 0, 0, 9, 0, 9, 9
    )
    assert window_ms(told, 5) == window_ms(told, 5, now_ms=25) == (0, 30)
    assert window_ms(told, 5, now_ms=26) == window_ms(told, 5, now_ms=85) == (34, 90)
    assert window_ms(told, 5, now_ms=24, pause_ms=2) == (34, 90)
    assert window_ms(told, 5, now_ms=86) == window_ms(told, 5, now_ms=500) == (91, NEVER_MS)
    assert [told.fits(5 * MS, now_ms * MS) for now_ms in (25, 26, 34, 86, 91)] == [True, False] * 2 + [True]


def test_where_no_stretch_is_as_long_as_a_step_it_does_not_begin():
    short = tuple(n * MS for n in range(1, 9))
    assert window_ms(bubble(0.5, short, 0, 9, 0, 9, 0, 9, 0, 0), 2) == (0, 0.5)


@given(
    st.lists(st.integers(1, 200 * MS), min_size=8, max_size=8).map(sorted),
    st.integers(MS, 20 * MS),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.integers(0, 2**32),
)
@example([1] * 4 + [MS] * 4, MS, [False] * 4 + [True] + [False] * 3, 0)  # half of them end at one moment
def test_what_overruns_cost_stays_within_the_bound(ends, step_ns, may, seed):
    """With ends that are spread evenly between the eighths, and steps that follow one another."""
    lasts = zip(may, ends, [ends[0], *ends], range(15, 0, -2), strict=False)
    may = [its and step_ns <= (end_ns - before_ns) * weight for its, end_ns, before_ns, weight in lasts]
    steps_ns = tuple(step_ns * its for its in may)
    told = OpenBubble(1, 0, ends[0], 0, False, tuple(ends), steps_ns)
    noise = random.Random(seed)
    count, caught_ns = 2000, 0.0
    edges = [ends[0], *ends]
    for _ in range(count):
        part = noise.randrange(8)
        end_ns = noise.uniform(edges[part], edges[part + 1])
        now_ns = 0
        while now_ns < end_ns:
            begin_ns, until_ns = told.window(step_ns, now_ns)
            now_ns = max(now_ns, begin_ns)
            if now_ns >= end_ns or now_ns + step_ns > until_ns:
                break
            now_ns += step_ns
            caught_ns += max(0, now_ns - end_ns)
    # A step is caught once in a bubble at most; how far it is then is even odds only on average over the lengths.
    assert caught_ns / count <= 2 * step_ns / 2 * sum(may) / 8 + step_ns / 20
