"""Answers in OpenAI's batch format, and the file that holds each of them once."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron.fill.llm.requests import Refused, Request


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with the logarithm of its probability.

    Attributes:
        top: the most probable tokens at its place, the best first.
    """

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a request's answers.

    Attributes:
        finish_reason: ``stop`` or ``length``.
        tokens: how many were generated.
        logprobs: of each token; None if nobody asked.
    """

    index: int
    text: str
    finish_reason: str
    tokens: int
    logprobs: Sequence[TokenLogprob] | None = None


def answer(request: Request, choices: Sequence[Choice], prompt_tokens: int, model: str) -> dict[str, Any]:
    """The line that answers a request; the same for the same choices, whenever it is made."""
    completion = sum(choice.tokens for choice in choices)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }
    body = {
        "id": ("chatcmpl-" if request.chat else "cmpl-") + _id(request),
        "object": "chat.completion" if request.chat else "text_completion",
        "created": 0,  # nobody needs it, and an answer that is made again is to be the same
        "model": request.model or model,
        "choices": [_chat_choice(choice) if request.chat else _text_choice(choice) for choice in choices],
        "usage": usage,
    }
    return _line(request, 200, body)


def error_answer(refused: Refused) -> dict[str, Any]:
    """The line that answers a request that is wrong."""
    error = {
        "message": refused.message,
        "type": "invalid_request_error",
        "param": refused.param,
        "code": None,
    }
    return _line(refused, refused.status_code, {"error": error})


def _line(request: Request | Refused, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    name = _id(request)
    response = {"status_code": status_code, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": request.custom_id, "response": response, "error": None}


def _id(request: Request | Refused) -> str:
    return sha256(f"{request.line} {request.custom_id}".encode()).hexdigest()[:24]


def _text_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        logprobs = {
            "tokens": [one.token for one in choice.logprobs],
            "token_logprobs": [one.logprob for one in choice.logprobs],
            "top_logprobs": [dict(one.top) for one in choice.logprobs],
        }
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


def _chat_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        content = [
            {**_token(one.token, one.logprob), "top_logprobs": [_token(*pair) for pair in one.top]}
            for one in choice.logprobs
        ]
        logprobs = {"content": content, "refusal": None}
    message = {"role": "assistant", "content": choice.text, "refusal": None}
    return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace"))}


class AnswerFile:
    """Answers, a line each.  Only whole lines count: what a kill left of one is cut off when the file is opened again.

    Args:
        path: it is made if it is not there.

    Attributes:
        count: answers that are there.

    Raises:
        OSError: it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._answered: set[str] = set()
        self._end = 0
        with open(path, "rb") as file:
            for data in file:
                if not data.endswith(b"\n"):
                    break
                self._answered.add(json.loads(data)["id"])
                self._end += len(data)
        os.ftruncate(self._file, self._end)
        self.count = len(self._answered)

    def answered(self, request: Request | Refused) -> bool:
        return f"batch_req_{_id(request)}" in self._answered

    def write(self, line: dict[str, Any]) -> None:
        """Add an answer.

        Raises:
            OSError: there is no room; the file is as it was.
        """
        data = json.dumps(line, ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._end + written)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(data)
        self._answered.add(line["id"])
        self.count += 1

    def sync(self) -> None:
        """What was written outlives the machine."""
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)
