"""When a tail job moves to an idle rank: where it gains more than the pause costs, and never to and fro."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.agent.mover import move_gain_s

STARVED: dict[str, Any] = {"speed": 0.01, "elsewhere": 0.2, "left_s": None, "ran_s": 60.0, "startup_s": 4.0}


def gain_s(**other: float) -> float:
    return move_gain_s(**STARVED | other)


def test_a_job_that_gets_little_moves():
    assert gain_s() == pytest.approx(60 * 0.95 - 8)


@pytest.mark.parametrize(
    "other",
    [
        {"startup_s": 20.0},  # the pause costs more than it gains
        {"left_s": 10.0},  # it is almost done
        {"ran_s": 10.0},  # nobody knows how much is left, and so far it was little
        {"speed": 0.17},  # it gets almost as much where it is
        {"speed": 0.5},
        {"elsewhere": 0.0},  # there are no bubbles
        {"elsewhere": 0.0, "speed": 0.0, "left_s": math.inf},
    ],
)
def test_one_that_gains_less_than_the_pause_costs_stays(other):
    assert gain_s(**other) == 0


def test_one_that_gets_nothing_at_all_moves():
    assert gain_s(speed=0.0, left_s=math.inf) == math.inf
    assert gain_s(speed=0.0) > 0


def test_the_one_that_has_most_left_gains_most():
    assert gain_s(left_s=900.0) > gain_s(left_s=100.0) > gain_s(left_s=1.0) == 0


SPEEDS = st.floats(0, 1000)
SECONDS = st.floats(0, 1e6)


@given(SPEEDS, SPEEDS, st.one_of(st.none(), SECONDS), SECONDS, SECONDS)
def test_no_move_is_worth_undoing(speed, elsewhere, left_s, ran_s, startup_s):
    """Where going there is worth it, coming back never is, whatever has become of the rest of the job."""
    there = move_gain_s(speed, elsewhere, left_s, ran_s, startup_s)
    back = move_gain_s(elsewhere, speed, left_s, ran_s, startup_s)
    assert not (there and back)


@given(st.lists(st.lists(st.tuples(SPEEDS, SPEEDS, SECONDS), max_size=2), min_size=1, max_size=6))
def test_moves_come_to_an_end(ranks):
    """Of ranks with up to two jobs each, the idle ones take what is worth it as long as there is something.

    Each move leaves one idle rank fewer, so there are at most as many moves as there were idle ranks.  A job is its
    speed as a tail job, its speed alone, and the seconds that are left of it.
    """
    idle = sum(not jobs for jobs in ranks)
    moves = 0
    while True:
        tails = [jobs for jobs in ranks if len(jobs) == 2]
        gains_s = [move_gain_s(speed, alone, left_s, 0.0, 5.0) for _, (speed, alone, left_s) in tails]
        free = next((jobs for jobs in ranks if not jobs), None)
        if free is None or not any(gains_s):
            break
        free.append(tails[gains_s.index(max(gains_s))].pop())
        moves += 1
        assert sum(not jobs for jobs in ranks) == idle - moves
    assert moves <= idle
