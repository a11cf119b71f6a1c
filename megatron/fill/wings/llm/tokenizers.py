"""Tokenizers: those of ``transformers``, and bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

BYTES = "byte_tokenizer.json"  # in a model's folder: its tokens are bytes

type Tokenizer = FolderTokenizer | ByteTokenizer


class FolderTokenizer:
    """A tokenizer of ``transformers``.

    Args:
        ends: ids that end a text besides the tokenizer's own.
    """

    closed = False  # True if ids from ``size`` on stand for nothing, though a model may have them

    def __init__(self, tokenizer: Any, ends: frozenset[int] = frozenset()) -> None:
        self.inner = tokenizer
        self._anchor: list[int] | None = None
        self._special: list[str] | None = None
        self.size = 1 + max(tokenizer.get_vocab().values(), default=-1)  # of the vocabulary, which may have holes
        own = tokenizer.eos_token_id
        self.eos_ids = ends | (frozenset() if own is None else frozenset([own]))
        # What a text without tokens begins with.
        self.begins = next((one for one in (tokenizer.bos_token_id, *sorted(self.eos_ids)) if one is not None), None)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a prompt; without ``special``, of a text that goes on with one."""
        return list(self.inner(text, add_special_tokens=special)["input_ids"])

    def decode(self, tokens: list[int], special: bool = False) -> str:
        """The text of ids; an incomplete character becomes U+FFFD.

        Args:
            special: True to include the names of tokens that have no text.
        """
        return self._after_text(tokens, skip_special=not special)

    def piece(self, token: int) -> str:
        """Text of a token; bytes of it that are no whole character are surrogates (``surrogateescape``)."""
        text = self._after_text([token], skip_special=False)
        if "\ufffd" not in text:
            return text
        form = str(self.inner.convert_ids_to_tokens(token))
        data = _bytes_of(form)
        return form if data is None else data.decode(errors="surrogateescape")

    def special(self, text: str) -> int | None:
        """The id of a token of this name that has no text; None if there is none."""
        found = self.inner.convert_tokens_to_ids(text)
        if found is None or self.inner.convert_ids_to_tokens(found) != text or self.decode([found]):
            return None
        return int(found)

    def has_special(self, text: str) -> bool:
        """True if the text contains the name of a token that has no text."""
        if self._special is None:
            names = {*self.inner.all_special_tokens, *self.inner.get_added_vocab()}
            self._special = [name for name in names if name and self.special(name) is not None]
        return any(name in text for name in self._special)

    def _after_text(self, tokens: list[int], skip_special: bool) -> str:
        """The text of ids that follow others: some decoders (Llama-2, Mistral) drop a space before the first one."""
        if self._anchor is None:
            self._anchor = list(self.inner("a", add_special_tokens=False)["input_ids"])
        before = self._decoded(self._anchor, skip_special)
        text = self._decoded([*self._anchor, *tokens], skip_special)
        return text[len(before) :] if before and text.startswith(before) else self._decoded(tokens, skip_special)

    def _decoded(self, tokens: list[int], skip_special: bool) -> str:
        return str(self.inner.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **arguments: Any
    ) -> list[int]:
        """The ids of a conversation, with the beginning of the answer.

        Args:
            tools: functions that the template describes.
            arguments: the template's own arguments.

        Raises:
            ValueError: the model has no template for that, or these messages do not fit it.
        """
        if not self.inner.chat_template:
            raise ValueError("this model has no chat template: expected /v1/completions with a prompt")
        try:
            found = self.inner.apply_chat_template(
                messages, tools, add_generation_prompt=True, return_dict=False, **arguments
            )
        except Exception as error:  # the template's own words, which are no class of ours
            raise ValueError(f"messages do not fit the model's chat template: {error}") from error
        if not list(found):
            raise ValueError("the model's chat template gives no token for these messages; expected one at least")
        return list(found)

    def same_tokens(self, other: Tokenizer) -> bool:
        """True if both give a text the same ids."""
        return isinstance(other, FolderTokenizer) and self.inner.get_vocab() == other.inner.get_vocab()

    def save(self, folder: Path) -> None:
        """Write it beside a model, for ``load_tokenizer``."""
        self.inner.save_pretrained(folder)


class ByteTokenizer:
    """UTF-8 as token ids, as ``scripts/preprocess_text.py`` writes it.

    Args:
        size: vocabulary size.
        end: the id that ends a text; no byte of UTF-8.
    """

    closed = True

    def __init__(self, size: int, end: int) -> None:
        self.size, self._end, self.eos_ids = size, end, frozenset([end])
        self.begins: int | None = end

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(text.encode(errors="replace"))

    def decode(self, tokens: list[int], special: bool = False) -> str:
        return bytes(token for token in tokens if token < 256 and token != self._end).decode(errors="replace")

    def piece(self, token: int) -> str:
        return bytes([token]).decode(errors="surrogateescape") if token < 256 and token != self._end else ""

    def special(self, text: str) -> int | None:
        return None

    def has_special(self, text: str) -> bool:
        return False

    def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **arguments: Any
    ) -> list[int]:
        raise ValueError("a model of bytes has no chat template: expected /v1/completions with a prompt")

    def same_tokens(self, other: Tokenizer) -> bool:
        return isinstance(other, ByteTokenizer) and (self.size, self._end) == (other.size, other._end)

    def save(self, folder: Path) -> None:
        (folder / BYTES).write_text(json.dumps({"size": self.size, "end": self._end}), encoding="utf-8")


def _bytes_of(form: str) -> bytes | None:
    """The bytes of a token with this form in its vocabulary; None if it is not in a notation of bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if byte := re.fullmatch("<0x([0-9A-F]{2})>", form):
        return bytes.fromhex(byte[1])
    alphabet = {letter: byte for byte, letter in bytes_to_unicode().items()}  # of byte-level BPE
    return bytes(alphabet[letter] for letter in form) if set(form) <= set(alphabet) else None
