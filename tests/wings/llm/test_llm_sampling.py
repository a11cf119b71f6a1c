"""From logits to what is drawn from, and where a sequence ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.wings.llm.sampling import Sampling, adjusted, distribution, logarithms
from megatron.fill.wings.llm.sequence import GeneratedSequence, TokenNote, Wanted
from tests.wings.llm.llm_plainly import plainly_adjusted

LOGITS = st.lists(st.floats(-30, 30), min_size=1, max_size=12).map(np.array)


@given(LOGITS, st.floats(0.05, 3), st.floats(0.01, 1))
def test_what_is_kept_reaches_the_share_and_no_token_less_does(logits, temperature, top_p):
    whole = distribution(logits, Sampling(temperature))
    cut = distribution(logits, Sampling(temperature, top_p))
    assert whole.sum() == pytest.approx(1)
    assert cut.sum() == pytest.approx(1)
    kept = cut > 0
    assert whole[kept].sum() >= top_p - 1e-9
    assert whole[kept].sum() - whole[kept].min() < top_p + 1e-9
    assert not kept.all() or top_p > 1 - whole.min() - 1e-9
    assert np.allclose(cut[kept], whole[kept] / whole[kept].sum())


@given(
    LOGITS,
    st.floats(0.05, 3),
    st.floats(0.01, 1),
    st.integers(0, 13),
    st.floats(0, 1),
)
def test_what_is_drawn_from_is_what_transformers_draws_from_in_the_order_of_vllm(logits, temperature, top_p, k, min_p):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    steps = [transformers.TemperatureLogitsWarper(temperature), transformers.MinPLogitsWarper(min_p)]
    steps += [transformers.TopKLogitsWarper(k)] if k else []
    steps += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    scores = torch.tensor(logits + 1e-6 * np.arange(len(logits)), dtype=torch.float64)  # none are equal
    found = distribution(scores.numpy(), Sampling(temperature, top_p, k, min_p))
    for step in steps:
        scores = step(None, scores[None])[0]
    expected = scores.softmax(-1).numpy()
    differing = (found > 0) != (expected > 0)
    assert differing.sum() <= 1  # a token at the edge of a share, by rounding
    if not differing.any():
        assert np.allclose(found, expected, atol=1e-12)


def test_of_equal_tokens_the_lower_ids_are_kept():
    assert distribution(np.zeros(4), Sampling(1.0, top_k=2)).tolist() == [0.5, 0.5, 0, 0]


TOKENS = st.lists(st.integers(0, 4), max_size=9)


@given(
    st.lists(st.floats(-9, 9), min_size=5, max_size=5),
    st.builds(
        Sampling,
        presence_penalty=st.sampled_from([0, -2, 0.5]),
        frequency_penalty=st.sampled_from([0, 1.5]),
        repetition_penalty=st.sampled_from([1, 0.5, 1.3]),
        logit_bias=st.sampled_from([(), ((1, 4.0), (3, -100.0))]),
    ),
    TOKENS,
    TOKENS,
)
def test_penalties_are_those_of_the_definition(logits, sampling, prompt, generated):
    before = np.array(logits)
    found = adjusted(before, sampling, np.unique(np.array(prompt, dtype=int)), generated)
    assert found.tolist() == pytest.approx(plainly_adjusted(logits, sampling, prompt, generated))
    assert before.tolist() == logits


def test_a_low_temperature_is_the_most_probable_token():
    assert distribution(np.array([0.0, 1.0, 0.5]), Sampling(1e-4)).tolist() == [0, 1, 0]


def test_a_share_of_nothing_keeps_one_token():
    assert distribution(np.array([0.0, 1.0, 0.5]), Sampling(1.0, 0.0)).tolist() == [0, 1, 0]


def test_logarithms_are_those_of_the_probabilities():
    logits = np.array([1.0, -2.0, 700.0], dtype=np.float32)
    assert np.allclose(np.exp(logarithms(logits)), distribution(logits, Sampling(1.0)))


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
