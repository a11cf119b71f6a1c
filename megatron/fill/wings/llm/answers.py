"""Answers of a batch, in OpenAI's batch format, and the file in which every request is answered exactly once."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.fill.wings.llm.requests import Refused, Request

_BYTES = "bytes:"  # before a completion's token that is shown by its bytes
_LEAST_LOGPROB = -9999.0  # as OpenAI gives that of a token that cannot be: JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a generated token, and of its alternatives."""

    token: str  # text; bytes of it that are no whole character are surrogates (``surrogateescape``)
    logprob: float  # natural logarithm; may be minus infinity
    top: tuple[tuple[str, float], ...] = ()  # the most probable tokens there, best first
    offset: int = 0  # number of characters of the choice's text before it


@dataclass(frozen=True, slots=True)
class Choice:
    """A generated text."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    tokens: int  # number of generated tokens
    logprobs: Sequence[TokenLogprob] | None = None
    vector: tuple[float, ...] | None = None  # a prompt's embedding, normalised, if there is no text


def answer(request: Request, choices: Sequence[Choice], prompt_tokens: int, model: str) -> dict[str, Any]:
    """The output line of a request.

    It depends on nothing but the arguments, so that a job that was killed gives the same file; ``created`` is 0.
    """
    if request.encoding is not None:
        return _line(request, 200, _embeddings(request.encoding, choices, prompt_tokens, model))
    generated = sum(choice.tokens for choice in choices)
    body = {
        "id": ("chatcmpl-" if request.chat else "cmpl-") + _digest(request),
        "object": "chat.completion" if request.chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": [_chat_choice(choice) if request.chat else _completion_choice(choice) for choice in choices],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
        },
    }
    return _line(request, 200, body)


def _embeddings(encoding: str, choices: Sequence[Choice], prompt_tokens: int, model: str) -> dict[str, Any]:
    data = []
    for choice in choices:
        assert choice.vector is not None
        found: str | list[float] = list(choice.vector)
        if encoding == "base64":
            found = base64.b64encode(struct.pack(f"<{len(choice.vector)}f", *choice.vector)).decode()
        data.append({"object": "embedding", "index": choice.index, "embedding": found})
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def error_answer(refused: Refused) -> dict[str, Any]:
    """The output line of a request that is wrong, or (status 500) that could not be answered."""
    kind = "invalid_request_error" if refused.status_code < 500 else "server_error"
    error = {"message": refused.message, "type": kind, "param": refused.param, "code": None, "line": refused.line}
    return _line(refused, refused.status_code, {"error": error})


def _line(request: Request | Refused, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": _id(request),
        "custom_id": request.custom_id,
        "response": {"status_code": status_code, "request_id": f"req_{_digest(request)}", "body": body},
        "error": None,
    }


def _id(request: Request | Refused) -> str:
    return f"batch_req_{_digest(request)}"


def _digest(request: Request | Refused) -> str:
    """Digest of the line and the custom id, which together are unique in the file."""
    return hashlib.sha256(json.dumps([request.line, request.custom_id]).encode()).hexdigest()[:24]


def _chat_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        content = [
            _chat_token(each.token, each.logprob) | {"top_logprobs": [_chat_token(*other) for other in each.top]}
            for each in choice.logprobs
        ]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


def _chat_token(token: str, logprob: float) -> dict[str, Any]:
    data = token.encode(errors="surrogateescape")
    return {"token": _shown(token), "logprob": _finite(logprob), "bytes": list(data)}


def _shown(token: str, mark: str = "") -> str:
    """A token as text; as OpenAI shows it, by its bytes, if some of them are no whole character."""
    try:
        token.encode()
    except UnicodeEncodeError:
        return mark + "".join(rf"\x{byte:02x}" for byte in token.encode(errors="surrogateescape"))
    return token


def _completion_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        logprobs = {
            "tokens": [_shown(each.token, _BYTES) for each in choice.logprobs],
            "token_logprobs": [_finite(each.logprob) for each in choice.logprobs],
            "top_logprobs": [_by_text(each) for each in choice.logprobs],
            "text_offset": [each.offset for each in choice.logprobs],
        }
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """The alternatives; of several tokens with the same text, the most probable."""
    return {_shown(text, _BYTES): _finite(logprob) for text, logprob in reversed(token.top)}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


class AnswerFile:
    """A file of answers to which whole lines are appended.

    Whenever its writer is killed, the next one finds which requests are answered: a line that is torn, and whatever
    comes after it, is dropped on opening.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the file, and make it if it is not there; OSError if it cannot be read or written."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._path, self._ids = path, set[str]()
        self._end = 0
        """Bytes of complete lines."""
        try:
            with open(self._fd, "rb", closefd=False) as file:
                for data in file:
                    if (found := _answered_by(data)) is None:
                        break
                    self._ids.add(found)
                    self._end += len(data)
            os.ftruncate(self._fd, self._end)
        except BaseException:
            os.close(self._fd)
            raise

    def __len__(self) -> int:
        """Number of answered requests."""
        return len(self._ids)

    def answered(self, request: Request | Refused) -> bool:
        """True if the file has the answer to this request."""
        return _id(request) in self._ids

    def write(self, line: dict[str, Any]) -> None:
        """Append what ``answer`` or ``error_answer`` gave.

        Raises:
            OSError: it could not be written, and the file is as it was.
            ValueError: the request is answered already, or a number in it is not finite.
        """
        if line["id"] in self._ids:
            raise ValueError(f"request {line['custom_id']!r} is answered already")
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], self._end + written)
        except BaseException as error:
            os.ftruncate(self._fd, self._end)
            if isinstance(error, OSError):
                error.filename = str(self._path)  # a descriptor has no name: say which disk is full
            raise
        self._ids.add(line["id"])
        self._end += len(data)

    def sync(self) -> None:
        """Wait until all that was written would survive a power failure."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _answered_by(data: bytes) -> str | None:
    """The id of the answer on a line; None if the line is not a whole answer."""
    if not data.endswith(b"\n"):
        return None
    try:
        value = json.loads(data)
    except ValueError:
        return None
    found = value.get("id") if isinstance(value, dict) else None
    return found if isinstance(found, str) else None
