"""Training data of a draft: a large model's answers to requests, as windows of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.fill import untrusted
from megatron.fill.errors import ConfigError
from megatron.fill.wings.llm.answering import prompt_tokens
from megatron.fill.wings.llm.requests import Request, read_requests

if TYPE_CHECKING:
    from megatron.fill.wings.llm.tokenizers import Tokenizer

NOT_LEARNT = -100  # a label that torch's cross entropy leaves out
_MOST_DEPTH, _MOST_VALUES = 16, 2_000_000  # of one line


def answered(requests: str, answers: str, tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts with what the large model went on with, as token ids; a request without an answer is left out.

    Raises:
        ConfigError: a file cannot be read, or is of another kind.
    """
    texts = _texts(Path(answers))
    for line in read_requests(requests):
        if not isinstance(line, Request) or line.encoding is not None:
            continue
        prompts = prompt_tokens(line, tokenizer, tokenizer.size) if line.custom_id in texts else []
        for index, text, stopped in texts.get(line.custom_id, ()):
            tokens = tokenizer.encode(text, special=False)
            if stopped and not line.stop:
                tokens += sorted(tokenizer.eos_ids)[:1]
            if tokens:
                yield prompts[index // line.n], tokens


def _texts(path: Path) -> dict[str, list[tuple[int, str, bool]]]:
    """The texts of each request, with their number and whether the model ended it itself."""
    found: dict[str, list[tuple[int, str, bool]]] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                custom_id, choices = _choices(line, f"{path}, line {number}")
                texts = [(one.get("text", one.get("message", {}).get("content")), one) for one in choices]
                found[custom_id] = [
                    (one.get("index", 0), text, one.get("finish_reason") == "stop") for text, one in texts
                ]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; expected the answers of a batch") from error
    return found


def _choices(line: str, where: str) -> tuple[str, list[dict[str, Any]]]:
    try:
        value = untrusted.parse_json(line, _MOST_DEPTH, _MOST_VALUES)
        body = value["response"]["body"] if value["response"]["status_code"] == 200 else {"choices": []}
        return value["custom_id"], [] if body.get("object") == "list" else body["choices"]
    except (json.JSONDecodeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: is not an answer of a batch: {error!r}") from error


class Windows:
    """Sequences cut into windows of one length, and their new tokens into spans.

    A span is what SpecInfer calls a prompt sample (section 3): the tokens with which the large model continues
    those before them.  A draft that expects them all, one after the other, has nothing to learn from it.

    Args:
        examples: prompts and the model's continuations.
        length: number of tokens that a window predicts.
        span: number of tokens in a span.

    Attributes:
        inputs: ``[windows, length]``, token ids.
        labels: ``[windows, length]``, the token after each; ``NOT_LEARNT`` where the model did not generate it.
        spans: ``[windows, length]``, the number of a label's span, from 0 in each window; -1 without a label.
        count: number of spans, ``[windows]``.
    """

    def __init__(self, examples: Iterator[tuple[list[int], list[int]]], length: int, span: int) -> None:
        rows = [row for prompt, new in examples for row in _rows([*prompt, *new], len(prompt), length)]
        self.inputs = np.zeros((len(rows), length), dtype=np.int64)
        self.labels = np.full((len(rows), length), NOT_LEARNT, dtype=np.int64)
        self.spans = np.full((len(rows), length), -1, dtype=np.int64)
        for at, (inputs, first, labels) in enumerate(rows):
            self.inputs[at, : len(inputs)] = inputs
            self.labels[at, first : first + len(labels)] = labels
            self.spans[at, first : first + len(labels)] = np.arange(len(labels)) // span
        self.count = self.spans.max(1, initial=-1) + 1

    def __len__(self) -> int:
        return len(self.inputs)

    def is_span(self) -> np.ndarray:
        """``[windows, most spans]``: which ones there are."""
        return np.arange(self.count.max(initial=0)) < self.count[:, None]

    def matched(self, window: int, right: np.ndarray) -> np.ndarray:
        """``[most spans]``: the spans of a window all of whose labels are right, ``right`` being ``[length]``."""
        found: np.ndarray = self.is_span()[window].copy()
        wrong = self.spans[window][(self.spans[window] >= 0) & ~right]
        found[wrong] = False
        return found


class Left:
    """A data set of what is left to learn: windows with a span that is not done, and labels of such spans only.

    Args:
        done: ``[windows, most spans]``.
    """

    def __init__(self, windows: Windows, done: np.ndarray) -> None:
        self._windows, self._done = windows, done
        self.order: list[int] = np.flatnonzero((windows.is_span() & ~done).any(1)).tolist()

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
        import torch

        at = self.order[index]
        spans = self._windows.spans[at]
        learnt = (spans >= 0) & ~self._done[at][spans]
        labels = np.where(learnt, self._windows.labels[at], NOT_LEARNT)
        return {"input_ids": torch.from_numpy(self._windows.inputs[at])}, {"labels": labels, "window": at}


def _rows(tokens: Sequence[int], first_new: int, length: int) -> Iterator[tuple[Sequence[int], int, Sequence[int]]]:
    """Windows: what goes in, the place of the first label, and labels; each label once, half a window before it."""
    label = max(first_new, 1)
    while label < len(tokens):
        begin = max(0, label - 1 - length // 2)
        end = min(len(tokens), begin + length + 1)
        yield tokens[begin : end - 1], label - 1 - begin, tokens[label:end]
        label = end
