"""Tokenizers whose decoders drop the first space, as those of Llama-2 and Mistral do."""

from __future__ import annotations

import pytest

from megatron.fill.wings.llm.sequence import GeneratedSequence, Wanted
from megatron.fill.wings.llm.tokenizers import FolderTokenizer

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: at for at, word in enumerate(["<unk>", "</s>", "\u2581a", "\u2581upon", "\u2581time", "s", "a"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return FolderTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>"))


def test_a_completion_keeps_its_first_space(tokenizer):
    assert tokenizer.decode([3, 4, 5]) == " upon times"
    assert "".join(map(tokenizer.piece, [3, 4, 5])) == " upon times"
    assert tokenizer.decode([5, 3]) == "s upon"
    assert tokenizer.decode([3, 1]) == " upon"
    assert tokenizer.decode([]) == ""


def test_a_stop_that_begins_with_a_space_is_seen(tokenizer):
    sequence = GeneratedSequence(Wanted((2,), 5, stop=(" upon",)))
    assert sequence.take([3, 4], [], frozenset(), tokenizer.decode) == 1
    assert (sequence.finish, sequence.text) == ("stop", "")
