"""Answers that are JSON: which tokens may come next, by llguidance, the library that vLLM and others use too."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from megatron.fill.errors import TaskError
from megatron.fill.wings.llm.tokenizers import ByteTokenizer, Tokenizer


class Grammars:
    """The grammars of a tokenizer; TaskError if llguidance is not installed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise TaskError(f"{error}: response_format needs pip install 'pipefill[json]'") from error
        self._matcher = LLMatcher
        self._size, self._ends = max(tokenizer.size, 1 + max(tokenizer.eos_ids, default=0)), tokenizer.eos_ids
        self._tokens: Any = None
        self._wrong = None if self._ends else "it has no end of text"  # reason that there are no grammars
        try:
            self._tokens = _tokens_of(tokenizer) if self._ends else None
        except Exception as error:  # whatever a tokenizer or llguidance says
            self._wrong = str(error)

    def of(self, schema: Mapping[str, Any]) -> Grammar:
        """The grammar of a JSON schema.

        Raises:
            ValueError: it is none, or uses what is not supported; or no grammar can be used with this tokenizer.
        """
        if self._wrong is not None:
            raise ValueError(f"response_format cannot be used with this model's tokenizer: {self._wrong}")
        try:
            grammar = self._matcher.grammar_from_json_schema(json.dumps(schema))
            wrong = self._matcher.validate_grammar(grammar, self._tokens)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise ValueError(f"response_format has a schema that is not supported: {wrong.strip().splitlines()[0]}")
        return Grammar(self._matcher(self._tokens, grammar, log_level=0), self._size, self._ends)


class Grammar:
    """Tokens that may continue one sequence.

    Args:
        matcher: llguidance's matcher, in its initial state.
        size: vocabulary size.
        ends: token ids that end a text; all may where the grammar has one of them.
    """

    def __init__(self, matcher: Any, size: int, ends: Collection[int]) -> None:
        self._matcher, self._size, self._ends = matcher, size, sorted(ends)
        self._taken: list[int] = []
        self._masks: dict[tuple[int, ...], np.ndarray] = {}  # by what follows
        self.error: str | None = None  # reason that it could not be followed to its end

    def allowed(self, generated: Sequence[int], path: tuple[int, ...]) -> np.ndarray:
        """Tokens allowed after the generated ones and then a path, ``[vocabulary]`` of bool, at least one True.

        Args:
            generated: tokens of the previous call, and any that follow.
        """
        if len(generated) > len(self._taken):
            self._masks = {}
            self._consume(self._matcher, generated[len(self._taken) :])
            self._taken = list(generated)
        if path not in self._masks:
            self._masks[path] = self._computed(path)
        return self._masks[path]

    def _computed(self, path: tuple[int, ...]) -> np.ndarray:
        found = np.zeros(self._size, dtype=bool)
        found[self._ends] = True
        if self.error is not None or set(path) & set(self._ends):
            return found  # what comes after the end is never taken
        matcher = self._matcher
        if path:
            matcher = matcher.deep_copy()
            if not matcher.consume_tokens(list(path)):  # a path that is impossible: never taken
                return found
        if matcher.is_stopped() and not matcher.is_error():
            return found
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.zeros(self._size, dtype=bool)
        known = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
        mask[: len(known)] = known
        if matcher.is_error() or not mask.any():
            if not path:
                self.error = matcher.get_error() or "no token may follow"
            return found
        mask[self._ends] = mask[self._ends].any()
        return mask

    def _consume(self, matcher: Any, tokens: Sequence[int]) -> None:
        inner = [token for token in tokens if token not in self._ends]
        if self.error is None and inner and not matcher.consume_tokens(inner):
            self.error = matcher.get_error() or "a token was refused"


def _tokens_of(tokenizer: Tokenizer) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    if isinstance(tokenizer, ByteTokenizer):
        return LLTokenizer(TokenizerWrapper(_Bytes(tokenizer)))
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer.inner, n_vocab=tokenizer.size, eos_token=sorted(tokenizer.eos_ids))


class _Bytes:
    """Interface of llguidance to tokens that are bytes."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        (self.eos_token_id,) = tokenizer.eos_ids
        self.bos_token_id = None
        self.tokens = [bytes([token]) if token < 256 else b"<%d>" % token for token in range(tokenizer.size)]
        self.special_token_ids = sorted({self.eos_token_id, *range(256, tokenizer.size)})

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
