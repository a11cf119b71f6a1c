"""When a tail job moves to an idle rank: where it gains more than the pause costs, and never to and fro."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.agent.mover import Prospect, best_move

STARVED = Prospect(job=1, speed=0.01, elsewhere=0.2, left_s=None, ran_s=60.0, startup_s=4.0)


def test_a_job_that_gets_little_moves():
    assert STARVED.gain_s == pytest.approx(60 * 0.95 - 8)
    assert STARVED.worth_it


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
    assert not replace(STARVED, **other).worth_it


def test_one_that_gets_nothing_at_all_moves():
    assert replace(STARVED, speed=0.0, left_s=math.inf).worth_it
    assert replace(STARVED, speed=0.0).worth_it


def test_the_one_that_gains_most_moves():
    long, short = replace(STARVED, job=2, left_s=900.0), replace(STARVED, job=3, left_s=100.0)
    assert best_move([short, long, replace(STARVED, job=4, left_s=1.0)]) == long
    assert best_move([replace(STARVED, left_s=1.0)]) is None
    assert best_move([]) is None


SPEEDS = st.floats(0, 1000)
SECONDS = st.floats(0, 1e6)


@given(SPEEDS, SPEEDS, st.one_of(st.none(), SECONDS), SECONDS, SECONDS)
def test_no_move_is_worth_undoing(speed, elsewhere, left_s, ran_s, startup_s):
    """Where going there is worth it, coming back never is, whatever has become of the rest of the job."""
    there = Prospect(1, speed, elsewhere, left_s, ran_s, startup_s)
    back = Prospect(1, elsewhere, speed, left_s, ran_s, startup_s)
    assert not (there.worth_it and back.worth_it)


@given(st.lists(st.lists(st.tuples(SPEEDS, SPEEDS, SECONDS), max_size=2), min_size=1, max_size=6))
def test_moves_come_to_an_end(ranks):
    """Of ranks with up to two jobs each, the idle ones take what is worth it as long as there is something.

    Each move leaves one idle rank fewer, so there are at most as many moves as there were idle ranks.  A job is its
    speed as a tail job, its speed alone, and the seconds that are left of it.
    """
    idle = sum(not jobs for jobs in ranks)
    moves = 0
    while True:
        tails = {number: jobs[1] for number, jobs in enumerate(ranks) if len(jobs) == 2}
        free = next((jobs for jobs in ranks if not jobs), None)
        best = best_move(
            [Prospect(number, tail, alone, left_s, 0.0, 5.0) for number, (tail, alone, left_s) in tails.items()]
        )
        if free is None or best is None:
            break
        free.append(ranks[best.job].pop())
        moves += 1
        assert sum(not jobs for jobs in ranks) == idle - moves
    assert moves <= idle
