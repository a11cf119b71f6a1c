"""From logits to what is drawn from, and where a sequence ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.llm.sampling import distribution, logarithms
from megatron.fill.llm.sequence import GeneratedSequence, TokenNote, Wanted

LOGITS = st.lists(st.floats(-30, 30), min_size=1, max_size=12).map(np.array)


@given(LOGITS, st.floats(0.05, 3), st.floats(0.01, 1))
def test_what_is_kept_reaches_the_share_and_no_token_less_does(logits, temperature, top_p):
    whole = distribution(logits, temperature, 1.0)
    cut = distribution(logits, temperature, top_p)
    assert whole.sum() == pytest.approx(1)
    assert cut.sum() == pytest.approx(1)
    kept = cut > 0
    assert whole[kept].sum() >= top_p - 1e-9
    assert whole[kept].sum() - whole[kept].min() < top_p + 1e-9
    assert not kept.all() or top_p > 1 - whole.min() - 1e-9
    assert np.allclose(cut[kept], whole[kept] / whole[kept].sum())


def test_a_low_temperature_is_the_most_probable_token():
    assert distribution(np.array([0.0, 1.0, 0.5]), 1e-4, 1.0).tolist() == [0, 1, 0]


def test_a_share_of_nothing_keeps_one_token():
    assert distribution(np.array([0.0, 1.0, 0.5]), 1.0, 0.0).tolist() == [0, 1, 0]


def test_logarithms_are_those_of_the_probabilities():
    logits = np.array([1.0, -2.0, 700.0], dtype=np.float32)
    assert np.allclose(np.exp(logarithms(logits)), distribution(logits, 1.0, 1.0))


def spell(tokens):
    """A token is a byte, as with byte-level tokenizers."""
    return bytes(tokens).decode(errors="replace")


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=4), st.integers(1, 9))
def test_the_text_ends_before_the_first_stop(text, stops, at_a_time):
    data = list(text.encode())
    sequence = GeneratedSequence(Wanted((0,), max(1, len(data)), stop=tuple(stops)))
    while data and sequence.finish is None:
        sequence.take(data[:at_a_time], [], (), spell)
        data = data[at_a_time:]
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        assert sequence.finish == "stop"
        # The stop that is complete first: one that begins earlier may still be growing.
        ends = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        assert sequence.text == text[: min(at for at in found if any(text[:ends][at:].startswith(s) for s in stops))]
    elif text:
        assert (sequence.finish, sequence.text) == ("length", text)


def test_what_was_generated_goes_on_in_another_process():
    wanted = Wanted((1, 2), 9, alternatives=2)
    sequence = GeneratedSequence(wanted)
    sequence.take([3, 4], [TokenNote(3, -0.5, ((3, -0.5), (9, -1.5))), TokenNote(4, -0.1)], (), spell)
    other = GeneratedSequence(wanted)
    other.load_state_dict(sequence.state_dict())
    assert (other.tokens, other.notes, other.left) == ([1, 2, 3, 4], sequence.notes, 7)
