"""Requests of a batch, in OpenAI's batch format: one JSON object a line.

What is wrong with one line is kept as a ``Refused`` for that line.  A file that has no JSON object at all is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megatron.fill import untrusted
from megatron.fill.errors import ConfigError
from megatron.fill.given.problems import shown
from megatron.fill.wings.llm.conversation import read_messages, read_template_arguments, read_tools
from megatron.fill.wings.llm.fields import (
    MOST_INTEGER,
    SAMPLING_FIELDS,
    WrongFieldError,
    integer,
    read_sampling,
    read_schema,
    text,
    wrong,
)
from megatron.fill.wings.llm.sampling import Sampling

_CHATS = {"/v1/completions": False, "/v1/chat/completions": True}
_EMBEDDINGS = "/v1/embeddings"
_EXPECTED = "a batch file: one JSON object a line, with custom_id, method, url and body"
_CUSTOM_ID = re.compile(r'"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')
_MOST_LINE_BYTES = 16 << 20
_MOST_DEPTH, _MOST_VALUES = 16, 2_000_000  # of one line
_MOST_CHOICES, _MOST_STOPS, _MOST_PROMPTS = 128, 4, 2048
_MOST_ALTERNATIVES = {False: 5, True: 20}  # by whether it is a chat: OpenAI's own limits
_DEFAULT_MAX_TOKENS = 16  # of a completion
_BOTH = {"model", "max_tokens", "logprobs", "n", "seed", "stop", "response_format"} | SAMPLING_FIELDS
_READ = {
    False: _BOTH | {"prompt"},
    True: _BOTH
    | {
        *("messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice"),
        *("chat_template_kwargs", "reasoning_effort"),
    },
}
_WITHOUT_EFFECT = {  # on the text
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prediction", "parallel_tool_calls", "stream_options"),
}
_NEUTRAL: dict[str, tuple[object, ...]] = {  # what is not supported, and values with which it asks for nothing
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
}


@dataclass(frozen=True, slots=True)
class Request:
    """A request that can be answered."""

    line: int  # number in the file, from 1
    custom_id: str
    chat: bool
    prompts: tuple[str | tuple[int, ...], ...]  # each a text or token ids; empty for a chat
    messages: tuple[dict[str, Any], ...] = ()
    """A chat, each with ``role``, ``content`` and perhaps ``name``, ``tool_calls`` or ``tool_call_id``."""
    tools: tuple[dict[str, Any], ...] = ()  # functions that a chat's template describes
    template: Mapping[str, Any] = field(default_factory=dict)  # arguments of a chat's template
    n: int = 1  # choices for each prompt
    max_tokens: int | None = None  # None for as many as the model's context leaves
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # number of alternatives for each token; None for no log probabilities
    encoding: Literal["float", "base64"] | None = None  # form of an embedding; None if the prompts are continued
    schema: Mapping[str, Any] | None = None  # JSON schema of its answers; None for any text


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that is wrong."""

    line: int
    custom_id: str | None
    message: str
    param: str | None  # the field that is wrong
    status_code: int = 400


class _NoObjectError(WrongFieldError):
    """A line is not a JSON object at all."""


def read_requests(path: str | Path) -> list[Request | Refused]:
    """All requests of a file, in its order.  Empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read, has no requests, or has no line that is a JSON object.
    """
    found: list[Request | Refused] = []
    taken: dict[str, int] = {}
    objects = 0
    try:
        with Path(path).open("rb") as file:
            for number, data in enumerate(_lines(file), 1):
                try:
                    value = _object(data, first=number == 1)
                except WrongFieldError as error:
                    custom_id = _custom_id_in(data)
                    taken.setdefault(custom_id or "", number)
                    objects += not isinstance(error, _NoObjectError)
                    found.append(Refused(number, custom_id, str(error), error.param))
                    continue
                if value is not None:
                    objects += 1
                    found.append(_checked(value, number, taken))
    except (OSError, ValueError) as error:  # ValueError: of a name that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}; expected {_EXPECTED}") from error
    if not found:
        raise ConfigError(f"{path}: is empty; expected {_EXPECTED}")
    if not objects:
        first = found[0]
        assert isinstance(first, Refused)
        raise ConfigError(f"{path}, line {first.line}: {first.message}; expected {_EXPECTED}")
    return found


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of one that is too long, no more than shows it."""
    while data := file.readline(_MOST_LINE_BYTES + 1):
        yield data
        while len(data) > _MOST_LINE_BYTES and not data.endswith(b"\n"):
            data = file.readline(_MOST_LINE_BYTES + 1)


def _object(data: bytes, first: bool) -> dict[str, Any] | None:
    """The object in a line; None if it is blank.

    Raises:
        WrongFieldError: it is not a JSON object, or one with a value that is not taken.
    """
    if len(data) > _MOST_LINE_BYTES:
        raise _NoObjectError(None, f"the line is longer than {_MOST_LINE_BYTES >> 20} MiB")
    try:
        said = data.decode("utf-8-sig" if first else "utf-8").strip()
        value = untrusted.parse_json(said, _MOST_DEPTH, _MOST_VALUES) if said else None
    except UnicodeDecodeError as error:
        raise _NoObjectError(None, "the line is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise _NoObjectError(None, f"the line is not JSON: {error}") from error
    except ValueError as error:  # JSON, but with a number or a text that is not taken
        raise WrongFieldError(None, str(error)) from error
    if said and not isinstance(value, dict):
        raise _NoObjectError(None, f"found {shown(value)} instead of a JSON object")
    return value


def _custom_id_in(data: bytes) -> str | None:
    """The custom id of a line that is not taken; None if it has none that can be read."""
    found = _CUSTOM_ID.search(data.decode(errors="replace"))
    try:
        custom_id = json.loads(found[1]) if found else None
        return custom_id if custom_id and custom_id.encode() else None
    except ValueError:  # UnicodeEncodeError is one
        return None


def _checked(value: dict[str, Any], line: int, taken: dict[str, int]) -> Request | Refused:
    """A request, or why it is none; ``taken`` has the lines of the custom ids so far."""
    custom_id = value.get("custom_id")
    try:
        custom_id = text(custom_id, "custom_id")
        if (other := taken.setdefault(custom_id, line)) != line:
            raise WrongFieldError(
                "custom_id", f"custom_id {shown(custom_id)} is that of line {other} too; expected another"
            )
        return _request(value, line)
    except WrongFieldError as error:
        return Refused(line, custom_id if isinstance(custom_id, str) else None, str(error), error.param)


def _request(value: dict[str, Any], line: int) -> Request:
    if value.get("method") != "POST":
        raise wrong("method", value.get("method"), "'POST'")
    url, body = value.get("url"), value.get("body")
    if not isinstance(url, str) or url not in (*_CHATS, _EMBEDDINGS):
        raise wrong("url", url, f"one of {', '.join((*_CHATS, _EMBEDDINGS))}")
    if not isinstance(body, dict):
        raise wrong("body", body, "a JSON object")
    body = {name: given for name, given in body.items() if given is not None}
    if "model" in body:  # the job's own answers, whatever its name
        text(body["model"], "model")
    if url == _EMBEDDINGS:
        return _embedding(value["custom_id"], body, line)
    chat = _CHATS[url]
    _refuse_unsupported(body, _READ[chat])
    return Request(
        line=line,
        custom_id=value["custom_id"],
        chat=chat,
        prompts=() if chat else _prompts(body.get("prompt"), "prompt"),
        messages=read_messages(body.get("messages")) if chat else (),
        tools=read_tools(body) if chat else (),
        template=read_template_arguments(body) if chat else {},
        n=integer(body.get("n", 1), "n", 1, _MOST_CHOICES),
        max_tokens=_max_tokens(body, chat),
        sampling=read_sampling(body),
        seed=integer(body["seed"], "seed", -MOST_INTEGER - 1, MOST_INTEGER) if "seed" in body else None,
        stop=_stop(body.get("stop", [])),
        logprobs=_logprobs(body, chat),
        schema=read_schema(body.get("response_format", {"type": "text"})),
    )


def _embedding(custom_id: str, body: dict[str, Any], line: int) -> Request:
    _refuse_unsupported(body, {"model", "input", "encoding_format"})
    encoding = body.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise wrong("encoding_format", encoding, "float or base64")
    return Request(
        line=line,
        custom_id=custom_id,
        chat=False,
        prompts=_prompts(body.get("input"), "input"),
        max_tokens=1,
        encoding=encoding,
    )


def _refuse_unsupported(body: dict[str, Any], read: set[str]) -> None:
    for name, given in body.items():
        if name in read or name in _WITHOUT_EFFECT or given in _NEUTRAL.get(name, ()):
            continue
        if name == "best_of" and given == body.get("n"):  # all that are generated are given
            continue
        raise WrongFieldError(name, f"{shown(name)} is {shown(given)}: this is not supported; leave it out")


def _max_tokens(body: dict[str, Any], chat: bool) -> int | None:
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    if name in body:
        return integer(body[name], name, 1, MOST_INTEGER)
    return None if chat else _DEFAULT_MAX_TOKENS


def _prompts(given: object, name: str) -> tuple[str | tuple[int, ...], ...]:
    """A text, token ids, or a list of some of these."""
    if not (isinstance(given, list) and given and isinstance(given[0], str | list)):
        return (_prompt(given, name),)
    if len(given) > _MOST_PROMPTS:
        raise WrongFieldError(name, f"{name} has {len(given)} prompts; expected at most {_MOST_PROMPTS}")
    if len(given) == 1:
        return (_prompt(given[0], name),)
    return tuple(_prompt(one, f"{name}[{place}]") for place, one in enumerate(given))


def _prompt(given: object, name: str) -> str | tuple[int, ...]:
    if isinstance(given, list) and given:
        return tuple(integer(token, name, 0, MOST_INTEGER) for token in given)
    return text(given, name, "text or a list of token ids")


def _stop(given: object) -> tuple[str, ...]:
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or len(given) > _MOST_STOPS:
        raise wrong("stop", given, f"text or a list of at most {_MOST_STOPS} texts")
    return tuple(text(one, "stop") for one in given)


def _logprobs(body: dict[str, Any], chat: bool) -> int | None:
    most = _MOST_ALTERNATIVES[chat]
    if not chat:
        return integer(body["logprobs"], "logprobs", 0, most) if "logprobs" in body else None
    wanted = body.get("logprobs", False)
    if not isinstance(wanted, bool):
        raise wrong("logprobs", wanted, "true or false")
    alternatives = integer(body.get("top_logprobs", 0), "top_logprobs", 0, most)
    if alternatives and not wanted:
        raise WrongFieldError("top_logprobs", f"top_logprobs is {alternatives}; expected logprobs to be true as well")
    return alternatives if wanted else None
