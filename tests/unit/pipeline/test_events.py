"""Bubbles of random schedules, against a discrete-event simulation that shares no code with the timeline."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.schedule_events import differs
from tests.support.schedule_text import parsed


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_bubbles_are_those_of_the_events(seed: int):
    assert not differs(seed)


def test_a_cycle_is_named():
    text = "own: 2 stages, 2 microbatches, 1 chunks:\n0: F0 B0 F1 B1\n1: F0 F1 B0 B1"
    with pytest.raises(ValueError, match="rank 0 at B0 waits for B0 of rank 1, which comes after F1; rank 1 at F1"):
        parsed(text)
