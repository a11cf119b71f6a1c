"""The tokens, probabilities and offsets of an answer are those of its text; special tokens may be stops."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("transformers")

from megatron.fill.wings.llm.answers import Choice, answer
from megatron.fill.wings.llm.logprobs import logprobs_of
from megatron.fill.wings.llm.sequence import GeneratedSequence, TokenNote, Wanted
from megatron.fill.wings.llm.tokenizers import ByteTokenizer, FolderTokenizer, Tokenizer
from tests.wings.llm.test_llm_answers import request


@pytest.fixture(scope="module")
def byte_level() -> FolderTokenizer:
    """As those of GPT-2, Llama-3 and Qwen: tokens are bytes in an alphabet of their own."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: at for at, word in enumerate(["h", "hello", "\u0120you", "lo", "</s>", *letters]) if at != 0}
    inner = Inner(models.BPE({word: at for at, word in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return FolderTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>"))


@pytest.fixture(scope="module")
def metaspace() -> FolderTokenizer:
    """As those of Llama-2 and Mistral: a byte that is in no other token is ``<0xC3>``."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "\u2581upon", "\u2581time", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = Inner(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return FolderTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>"))


def ids(tokenizer: FolderTokenizer, *names: str) -> list[int]:
    return [int(one) for one in tokenizer.inner.convert_tokens_to_ids(list(names))]


def choice(tokenizer: Tokenizer, tokens: list[int], chat: bool = False, **wanted: Any) -> dict[str, Any]:
    """The answer's choice for a model that gives these tokens; every one with the same alternatives."""
    best = tuple((token, -float(at)) for at, token in enumerate(tokens))
    notes = [TokenNote(token, -0.5, best) for token in tokens]
    ends = [one for stop in wanted.get("stop", ()) if (one := tokenizer.special(stop)) is not None]
    mixed = [stop for stop in wanted.get("stop", ()) if tokenizer.special(stop) is None and tokenizer.has_special(stop)]
    more: dict[str, Any] = {"stop_ids": tuple(ends), "special_stops": tuple(mixed)}
    sequence = GeneratedSequence(Wanted((1,), len(tokens), **more, **wanted))
    sequence.take(tokens, notes, tokenizer.eos_ids, tokenizer.decode)
    assert sequence.finish in ("stop", "length")
    resumed = GeneratedSequence(sequence.wanted)
    resumed.load_state_dict(json.loads(json.dumps(sequence.state_dict())))
    noted = logprobs_of(resumed, tokenizer)
    made = Choice(0, resumed.text, sequence.finish, len(resumed.generated), noted)
    return dict(answer(request(chat=chat), [made], 1, "m")["response"]["body"]["choices"][0])


def test_logprobs_end_where_the_text_does(byte_level: FolderTokenizer) -> None:
    h, e, hello, you, end = ids(byte_level, "h", "e", "hello", "\u0120you", "</s>")
    cut = choice(byte_level, [h, hello, h, you, h], stop=("el",))
    assert (cut["text"], cut["finish_reason"]) == ("hh", "stop")
    assert cut["logprobs"]["tokens"] == ["h", "hello"]
    assert cut["logprobs"]["text_offset"] == [0, 1]
    assert [len(cut["logprobs"][name]) for name in ("token_logprobs", "top_logprobs")] == [2, 2]
    none = choice(byte_level, [h, e], stop=("he",))
    assert (none["text"], none["logprobs"]["tokens"], none["logprobs"]["text_offset"]) == ("", [], [])
    ended = choice(byte_level, [hello, you, end, h])
    assert (ended["text"], ended["logprobs"]["tokens"]) == ("hello you", ["hello", " you"])
    assert ended["logprobs"]["text_offset"] == [0, 5]
    content = choice(byte_level, [hello, end], chat=True)["logprobs"]["content"]
    assert [one["token"] for one in content] == ["hello"]


def test_offsets_are_those_of_the_text(metaspace: FolderTokenizer) -> None:
    tokens = ids(metaspace, "\u2581upon", "\u2581time", "s", "<0xC3>", "<0xA9>", "\u2581upon", "<0xF0>", "<0x9F>")
    found = choice(metaspace, tokens)
    assert found["text"].startswith(" upon timesé upon")
    assert found["logprobs"]["text_offset"] == [0, 5, 10, 11, 11, 12, 17, 18]
    assert found["logprobs"]["tokens"] == [" upon", " time", "s", r"bytes:\xc3", r"bytes:\xa9", " upon",
                                           r"bytes:\xf0", r"bytes:\x9f"]  # fmt: skip


@pytest.mark.parametrize("kind", ["byte_level", "bytes"])
def test_parts_of_characters_are_told_apart(kind: str, byte_level: FolderTokenizer) -> None:
    tokenizer: Tokenizer = byte_level if kind == "byte_level" else ByteTokenizer(257, 256)
    data = "aé€😀".encode()
    tokens = list(data) if kind == "bytes" else byte_level.encode("aé€😀")
    assert len(tokens) == len(data)
    found = choice(tokenizer, tokens)
    assert found["text"] == "aé€😀"
    assert found["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    parts = ["a", *(rf"bytes:\x{byte:02x}" for byte in data[1:])]
    assert found["logprobs"]["tokens"] == parts
    assert set(found["logprobs"]["top_logprobs"][0]) == set(parts)
    content = choice(tokenizer, tokens, chat=True)["logprobs"]["content"]
    assert bytes(byte for one in content for byte in one["bytes"]) == data
    assert content[1]["token"] == r"\xc3"
    assert content[0]["top_logprobs"][2] == {"token": r"\xa9", "logprob": -2.0, "bytes": [0xA9]}
    cut = choice(tokenizer, tokens[:-2])
    assert (cut["text"], len(cut["logprobs"]["tokens"])) == ("aé€\ufffd", len(tokens) - 2)
    assert cut["logprobs"]["text_offset"][-2:] == [3, 3]


def test_a_special_token_is_a_stop(byte_level: FolderTokenizer) -> None:
    hello, you, special = ids(byte_level, "hello", "\u0120you", "<|im_end|>")
    assert byte_level.special("<|im_end|>") == special
    assert [byte_level.special(text) for text in ("hello", "h", "nothing", "<|im_end|> ")] == [None] * 4
    assert choice(byte_level, [hello, special, you])["text"] == "hello you"
    found = choice(byte_level, [hello, special, you], stop=("<|im_end|>",))
    assert (found["text"], found["finish_reason"]) == ("hello", "stop")
    assert found["logprobs"]["tokens"] == ["hello"]


@pytest.mark.parametrize(
    ("stop", "text", "noted"),
    [
        ("<|im_end|>lo", "hello you", 2),
        ("<|im_end|>l", "hello you", 2),
        ("ou<|im_end|>", "hello y", 2),
        ("lo you<|im_end|>lo<|im_end|>h", "hel", 1),
        ("<|im_end|>\n", None, 0),  # not there
        ("you<|im_end|><|im_end|>", None, 0),
    ],
)
def test_a_stop_may_be_a_special_token_and_text(byte_level: FolderTokenizer, stop: str, text: str, noted: int) -> None:
    hello, you, special, lo, h = ids(byte_level, "hello", "\u0120you", "<|im_end|>", "lo", "h")
    assert byte_level.has_special(stop)
    assert not byte_level.has_special("hello|im_end|")
    found = choice(byte_level, [hello, you, special, lo, special, h], stop=("nothing", stop))
    if text is None:
        assert (found["text"], found["finish_reason"]) == ("hello youloh", "length")
    else:
        assert (found["text"], found["finish_reason"]) == (text, "stop")
        assert len(found["logprobs"]["tokens"]) == noted


def test_the_first_of_all_stops_counts(byte_level: FolderTokenizer) -> None:
    hello, you, special, lo = ids(byte_level, "hello", "\u0120you", "<|im_end|>", "lo")
    for stop in (("<|im_end|>lo", "o\u0020"), ("o\u0020", "<|im_end|>lo")):
        assert choice(byte_level, [hello, you, special, lo], stop=stop)["text"] == "hell"
    # The same letters, written by other tokens, are no special token, but they are that text.
    letters = ids(byte_level, *"<|im_end|>lo")
    assert choice(byte_level, [hello, *letters], stop=("<|im_end|>lo",))["text"] == "hello"
