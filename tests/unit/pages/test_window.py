"""When a step may begin in a bubble whose end is known in eighths only."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.pages.gate import OpenBubble

MS = 1_000_000
NEVER_MS = (1 << 62) / MS
EVENLY = tuple(n * 10 * MS for n in range(1, 9))  # ends after 10, 20 ... 80 ms


def bubble(deadline_ms: float, ends_ns: tuple[int, ...], overrun_ms: float) -> OpenBubble:
    return OpenBubble(1, 0, int(deadline_ms * MS), 0, False, ends_ns, int(overrun_ms * MS))


def window_ms(told: OpenBubble, step_ms: float) -> tuple[float, float]:
    begin_ns, end_ns = told.window(int(step_ms * MS))
    return begin_ns / MS, end_ns / MS


def test_the_longer_a_step_the_fewer_bubbles_may_catch_it():
    told = bubble(9, EVENLY, 1)
    # A caught step of 2 ms runs on for 1 ms on average: it may be caught in every case.
    assert window_ms(told, 2) == (0, NEVER_MS)
    assert window_ms(told, 4) == (0, 40)
    assert window_ms(told, 8) == (0, 20)
    assert window_ms(told, 9) == (0, 10)
    # In an eighth of the cases one of 20 ms would cost 1.25 ms.
    assert window_ms(bubble(25, EVENLY, 1), 20) == (0, 25)


def test_nothing_is_filled_beyond_the_deadline_where_overruns_may_cost_nothing_or_the_ends_are_unknown():
    assert window_ms(bubble(9, EVENLY, 0), 2) == (0, 9)
    assert window_ms(bubble(9, (), 1), 2) == (0, 9)
    assert window_ms(bubble(9, EVENLY, 1), 0) == (0, 9)  # a step of which nothing is known


def test_where_most_bubbles_are_short_a_step_waits_until_they_have_ended():
    mostly_short = (MS // 10, MS // 5, MS // 2, MS, 90 * MS, 95 * MS, 99 * MS, 120 * MS)
    assert window_ms(bubble(0, mostly_short, 1), 2) == (1, NEVER_MS)
    assert window_ms(bubble(0, mostly_short, 0.3), 2) == (1, 95)  # caught in 2 more cases of 8


def test_where_no_gap_is_as_long_as_a_step_it_does_not_begin():
    short = tuple(n * MS for n in range(1, 9))
    begin_ms, end_ms = window_ms(bubble(0.5, short, 5), 2)
    assert end_ms - begin_ms < 2


@given(
    st.lists(st.integers(1, 200 * MS), min_size=8, max_size=8).map(sorted),
    st.integers(MS, 20 * MS),
    st.integers(0, 10 * MS),
    st.integers(0, 2**32),
)
def test_what_overruns_cost_stays_within_the_bound(ends, step_ns, overrun_ns, seed):
    """With ends that are spread evenly between the eighths, and steps that follow one another."""
    told = OpenBubble(1, 0, ends[0], 0, False, tuple(ends), overrun_ns)
    begin_ns, until_ns = told.window(step_ns)
    noise = random.Random(seed)
    count, caught_ns = 2000, 0.0
    edges = [ends[0], *ends]
    for _ in range(count):
        part = noise.randrange(8)
        end_ns = noise.uniform(edges[part], edges[part + 1])
        now_ns = begin_ns
        while now_ns < end_ns and now_ns + step_ns <= until_ns:
            now_ns += step_ns
        caught_ns += max(0, now_ns - end_ns) * (now_ns > begin_ns)
    # A step is caught once in a bubble at most; how far it is then is even odds only on average over the lengths.
    assert caught_ns / count <= 2 * overrun_ns + step_ns / 20
