"""Figures of a file of answers: how many there are, and of how many tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron.fill import untrusted

_MOST_DEPTH, _MOST_VALUES = 32, 5_000_000  # of one line


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """Counts of a file of answers.

    Attributes:
        answered: number of requests with status 200.
        failed: number of requests with an error.
        prompt_tokens, completion_tokens: number of tokens of the answered requests.
    """

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        """As ``--json`` prints it."""
        return {
            "answered": self.answered,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }


def count_answers(lines: Iterable[bytes]) -> AnswerCounts:
    """The figures of the lines of a file; what is no answer is left out, for a job could have written anything."""
    answered = failed = prompts = completions = 0
    for line in lines:
        try:
            value = untrusted.parse_json(line, _MOST_DEPTH, _MOST_VALUES)
            response = value["response"]
            if response["status_code"] != 200:
                failed += 1
                continue
            usage: dict[str, Any] = response["body"]["usage"]
            prompt, completion = int(usage["prompt_tokens"]), int(usage.get("completion_tokens", 0))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        answered, prompts, completions = answered + 1, prompts + prompt, completions + completion
    return AnswerCounts(answered, failed, prompts, completions)
