"""Log probabilities of an answer's tokens, and where each begins in its text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.fill.wings.llm.answers import TokenLogprob
from megatron.fill.wings.llm.sequence import Decode, GeneratedSequence
from megatron.fill.wings.llm.tokenizers import Tokenizer

_MOST_PARTS = 8  # tokens of one character, and of bytes before it that are none


def logprobs_of(sequence: GeneratedSequence, tokenizer: Tokenizer) -> list[TokenLogprob]:
    """Those of the tokens that are in the text of a sequence that has ended, the last perhaps with its beginning only.

    What ended the text is not in it: the end of a text, a stop, and what comes after the stop in its token.
    """
    piece, length = tokenizer.piece, len(sequence.text)
    found = []
    offsets = text_offsets(sequence.generated, tokenizer.decode)
    for note, offset in zip(sequence.notes, offsets, strict=True):
        if sequence.finish == "stop" and offset >= length:
            break
        top = tuple((piece(token), value) for token, value in note.best)
        found.append(TokenLogprob(piece(note.token), note.logarithm, top, min(offset, length)))
    return found


def text_offsets(tokens: Sequence[int], decode: Decode) -> list[int]:
    """The characters of the text before each token; a token that goes on with a character has that of the character."""
    offsets: list[int] = []
    before, begun = 0, 0  # characters, and tokens, whose text is whole
    while begun < len(tokens):
        count, whole = 1, decode([tokens[begun]])
        while whole.endswith("\ufffd") and begun + count < len(tokens) and count < _MOST_PARTS:
            count += 1
            whole = decode(list(tokens[begun : begun + count]))
        for part in range(count):
            shared = _shared(decode(list(tokens[begun : begun + part])), whole) if part else 0
            offsets.append(before + min(shared, max(0, len(whole) - 1)))
        begun, before = begun + count, before + len(whole)
    return offsets


def _shared(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))
