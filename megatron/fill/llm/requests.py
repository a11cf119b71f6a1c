"""Requests in OpenAI's batch format: a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megatron.fill.errors import ConfigError

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_MOST_LINE = 16 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        line: its number in the file, from 1.
        prompt: text or token ids; None for a chat.
        messages: of a chat.
        max_tokens: None for as many as the model's context leaves.
        seed: None for the job's own.
        stop: texts that end an answer.
        logprobs: how many of the most probable tokens to list at each place; None lists nothing.
    """

    line: int
    custom_id: str
    chat: bool
    model: str
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] = ()
    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that cannot be answered.

    Attributes:
        custom_id: None if it has none.
        param: the field that is wrong, where it is one.
    """

    line: int
    custom_id: str | None
    status_code: int
    message: str
    param: str | None = None


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def _alone(value: Any) -> Any:
    """A list of one prompt is that prompt."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list) else value


def _listed(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


_Neutral = Literal[None, 0, False]
_Token = Annotated[int, Field(ge=0)]


class _Body(_Part):
    """What both kinds of requests have; what would change an answer and is not supported has to be neutral."""

    model: str = ""
    n: Annotated[int, Field(ge=1, le=128)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_listed), Field(max_length=4)] = []
    stream: _Neutral = None
    frequency_penalty: _Neutral | float = Field(None, ge=0, le=0)
    presence_penalty: _Neutral | float = Field(None, ge=0, le=0)
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None


class _Completion(_Body):
    prompt: Annotated[
        str | Annotated[list[_Token], Field(min_length=1)],
        BeforeValidator(_alone),
    ]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: _Neutral = None
    suffix: None = None
    best_of: Literal[None, 1] = None


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: str
    content: str


class _Chat(_Body):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None


class _Line(_Part):
    custom_id: Annotated[str, Field(min_length=1)]
    method: Literal["POST"]
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]


def read_requests(path: Path) -> Iterator[Request | Refused]:
    """The requests of a file; empty lines are passed over.

    Raises:
        ConfigError: it is no file of requests: it cannot be read, has no line, or a line is no JSON object.
    """
    known: set[str] = set()
    any_line = False
    try:
        with path.open("rb") as file:
            for number, data in enumerate(iter(lambda: file.readline(_MOST_LINE), b""), 1):
                if not data.strip():
                    continue
                any_line = True
                found = _read(path, number, data)
                if found.custom_id is not None and found.custom_id in known:
                    message = f"custom_id is {found.custom_id!r:.80}, as in an earlier line; expected another in each"
                    found = Refused(number, found.custom_id, 400, message, "custom_id")
                elif found.custom_id is not None:
                    known.add(found.custom_id)
                yield found
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a file of requests") from error
    if not any_line:
        raise ConfigError(f"{path} is empty; expected a request in each line, a JSON object")


def _read(path: Path, number: int, data: bytes) -> Request | Refused:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{number}: {error}; expected a request, a JSON object") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}:{number}: a {type(value).__name__}; expected a request, a JSON object")
    custom_id = value.get("custom_id")
    try:
        line = _Line.model_validate(value)
        if line.url == _COMPLETIONS:
            return _completion(number, line, _Completion.model_validate(line.body))
        return _chat(number, line, _Chat.model_validate(line.body))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(map(str, first["loc"])) or "body"
        message = f"{param} is {first['input']!r:.80}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        if first["type"] == "missing":
            message = f"{param} is missing"
        elif param in _Body.model_fields or param in ("echo", "suffix", "best_of", "tools", "functions"):
            message += "; anything else is not supported"
        return Refused(number, custom_id if isinstance(custom_id, str) else None, 400, message, param)


def _completion(number: int, line: _Line, body: _Completion) -> Request:
    prompt = body.prompt if isinstance(body.prompt, str) else tuple(body.prompt)
    return _request(number, line, body, prompt=prompt, max_tokens=body.max_tokens, logprobs=body.logprobs)


def _chat(number: int, line: _Line, body: _Chat) -> Request:
    return _request(
        number,
        line,
        body,
        messages=tuple(message.model_dump() for message in body.messages),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _request(number: int, line: _Line, body: _Body, **own: Any) -> Request:
    return Request(
        number,
        line.custom_id,
        line.url == _CHAT,
        body.model,
        n=body.n,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop=tuple(body.stop),
        **own,
    )
