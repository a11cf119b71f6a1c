"""Requests of a batch, in OpenAI's batch format: one JSON object a line.

What is wrong with one request is kept as a ``Refused`` for that line.  A file that is no batch at all is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.fill import untrusted
from megatron.fill.errors import ConfigError
from megatron.fill.given.problems import shown

_CHATS = {"/v1/completions": False, "/v1/chat/completions": True}
_EXPECTED = "a batch file: one JSON object a line, with custom_id, method, url and body"
_MOST_LINE_BYTES = 16 << 20
_MOST_DEPTH, _MOST_VALUES = 16, 2_000_000  # of one line
_MOST_INTEGER = 2**63 - 1
_MOST_CHOICES, _MOST_STOPS = 128, 4
_MOST_ALTERNATIVES = {False: 5, True: 20}  # by whether it is a chat: OpenAI's own limits
_DEFAULT_MAX_TOKENS = 16  # of a completion
_ROLES = ("system", "developer", "user", "assistant")
_READ = {
    False: {"model", "prompt", "max_tokens", "logprobs", "n", "temperature", "top_p", "seed", "stop"},
    True: {
        *("model", "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"),
        *("n", "temperature", "top_p", "seed", "stop"),
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
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request that can be answered."""

    line: int
    """In the file, from 1."""
    custom_id: str
    chat: bool
    prompt: str | tuple[int, ...] | None
    """Of a completion: text or token ids."""
    messages: tuple[dict[str, str], ...]
    """Of a chat: each with ``role``, ``content`` and perhaps ``name``."""
    model: str
    """Empty if it does not say."""
    n: int
    max_tokens: int | None
    """None: as many as the model's context leaves."""
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    logprobs: int | None
    """How many alternatives are given for each token; None: no log probabilities at all."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that is wrong."""

    line: int
    custom_id: str | None
    message: str
    param: str | None
    """The field that is wrong."""
    status_code: int = 400


class _Wrong(Exception):
    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


def read_requests(path: str | Path) -> list[Request | Refused]:
    """All requests of a file, in its order.  Empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read, has no requests, or has a line that is not a JSON object: naming the line.
    """
    found: list[Request | Refused] = []
    taken: dict[str, int] = {}
    try:
        with Path(path).open("rb") as file:
            number = 0
            while data := file.readline(_MOST_LINE_BYTES + 1):
                number += 1
                try:
                    value = _object(data, f"{path}, line {number}", first=number == 1)
                except _Wrong as error:
                    found.append(Refused(number, None, str(error), error.param))
                    continue
                if value is not None:
                    found.append(_checked(value, number, taken))
    except (OSError, ValueError) as error:  # ValueError: of a name that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}; expected {_EXPECTED}") from error
    if not found:
        raise ConfigError(f"{path}: is empty; expected {_EXPECTED}")
    return found


def _object(data: bytes, where: str, first: bool) -> dict[str, Any] | None:
    """What a line says; None if it is blank.

    Raises:
        ConfigError: it is not a JSON object.
        _Wrong: it is one with a value that is not taken.
    """
    if len(data) > _MOST_LINE_BYTES:
        raise ConfigError(f"{where}: is longer than {_MOST_LINE_BYTES >> 20} MiB; expected {_EXPECTED}")
    try:
        text = data.decode("utf-8-sig" if first else "utf-8").strip()
        value = untrusted.parse_json(text, _MOST_DEPTH, _MOST_VALUES) if text else None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: is not UTF-8 text; expected {_EXPECTED}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: is not JSON: {error}; expected {_EXPECTED}") from error
    except ValueError as error:  # JSON, but with a number or a text that is not taken
        raise _Wrong(None, str(error)) from error
    if text and not isinstance(value, dict):
        raise ConfigError(f"{where}: found {shown(value)}; expected {_EXPECTED}")
    return value


def _checked(value: dict[str, Any], line: int, taken: dict[str, int]) -> Request | Refused:
    """A request, or why it is none; ``taken`` has the lines of the custom ids so far."""
    custom_id = value.get("custom_id")
    try:
        custom_id = _text(custom_id, "custom_id")
        if (other := taken.setdefault(custom_id, line)) != line:
            raise _Wrong("custom_id", f"custom_id {shown(custom_id)} is that of line {other} too; expected another")
        return _request(value, line)
    except _Wrong as error:
        return Refused(line, custom_id if isinstance(custom_id, str) else None, str(error), error.param)


def _request(value: dict[str, Any], line: int) -> Request:
    if value.get("method") != "POST":
        raise _Wrong("method", f"method is {shown(value.get('method'))}; expected 'POST'")
    url, body = value.get("url"), value.get("body")
    if not isinstance(url, str) or url not in _CHATS:
        raise _Wrong("url", f"url is {shown(url)}; expected one of {', '.join(_CHATS)}")
    if not isinstance(body, dict):
        raise _Wrong("body", f"body is {shown(body)}; expected a JSON object")
    body = {name: given for name, given in body.items() if given is not None}
    chat = _CHATS[url]
    _refuse_unsupported(body, chat)
    max_tokens = _max_tokens(body, chat)
    return Request(
        line=line,
        custom_id=value["custom_id"],
        chat=chat,
        prompt=None if chat else _prompt(body.get("prompt")),
        messages=_messages(body.get("messages")) if chat else (),
        model=_text(body["model"], "model") if "model" in body else "",
        n=_integer(body.get("n", 1), "n", 1, _MOST_CHOICES),
        max_tokens=max_tokens,
        temperature=_number(body.get("temperature", 1), "temperature", 2, lambda number: number >= 0, "from 0"),
        top_p=_number(body.get("top_p", 1), "top_p", 1, lambda number: number > 0, "above 0"),
        seed=_integer(body["seed"], "seed", -_MOST_INTEGER, _MOST_INTEGER) if "seed" in body else None,
        stop=_stop(body.get("stop", [])),
        logprobs=_logprobs(body, chat),
    )


def _refuse_unsupported(body: dict[str, Any], chat: bool) -> None:
    for name, given in body.items():
        if name in _READ[chat] or name in _WITHOUT_EFFECT or given in _NEUTRAL.get(name, ()):
            continue
        if name == "best_of" and given == body.get("n"):  # all that are generated are given
            continue
        raise _Wrong(name, f"{shown(name)} is {shown(given)}: this is not supported; leave it out")


def _max_tokens(body: dict[str, Any], chat: bool) -> int | None:
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    if name in body:
        return _integer(body[name], name, 1, _MOST_INTEGER)
    return None if chat else _DEFAULT_MAX_TOKENS


def _prompt(given: object) -> str | tuple[int, ...]:
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) > 1:
            raise _Wrong("prompt", f"prompt has {len(given)} prompts; expected one: give each a line of its own")
        given = given[0]
    if isinstance(given, list) and given:
        return tuple(_integer(token, "prompt", 0, _MOST_INTEGER) for token in given)
    return _text(given, "prompt", "text or a list of token ids")


def _messages(given: object) -> tuple[dict[str, str], ...]:
    if not isinstance(given, list) or not given:
        raise _Wrong("messages", f"messages is {shown(given)}; expected a list with at least one message")
    return tuple(_message(message, f"messages[{place}]") for place, message in enumerate(given))


def _message(given: object, where: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise _Wrong(where, f"{where} is {shown(given)}; expected a JSON object with role and content")
    if given.get("role") not in _ROLES:
        raise _Wrong(where, f"{where}: role is {shown(given.get('role'))}; expected one of {', '.join(_ROLES)}")
    for name, value in given.items():
        if name not in ("role", "content", "name") and value not in (None, [], {}):
            raise _Wrong(where, f"{where}: {shown(name)} is {shown(value)}: this is not supported; leave it out")
    content = given.get("content")
    if isinstance(content, list) and content:  # in parts
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise _Wrong(where, f"{where}: content has {shown(part)}; expected parts of type 'text' only")
        content = "".join(_text(part.get("text"), f"{where}.content", empty=True) for part in content)
    found = {"role": given["role"], "content": _text(content, f"{where}.content", empty=True)}
    if given.get("name") is not None:
        found["name"] = _text(given["name"], f"{where}.name")
    return found


def _stop(given: object) -> tuple[str, ...]:
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or len(given) > _MOST_STOPS:
        raise _Wrong("stop", f"stop is {shown(given)}; expected text or a list of at most {_MOST_STOPS} texts")
    return tuple(_text(text, "stop") for text in given)


def _logprobs(body: dict[str, Any], chat: bool) -> int | None:
    most = _MOST_ALTERNATIVES[chat]
    if not chat:
        return _integer(body["logprobs"], "logprobs", 0, most) if "logprobs" in body else None
    wanted = body.get("logprobs", False)
    if not isinstance(wanted, bool):
        raise _Wrong("logprobs", f"logprobs is {shown(wanted)}; expected true or false")
    alternatives = _integer(body.get("top_logprobs", 0), "top_logprobs", 0, most)
    if alternatives and not wanted:
        raise _Wrong("top_logprobs", f"top_logprobs is {alternatives}; expected logprobs to be true as well")
    return alternatives if wanted else None


def _text(given: object, name: str, expected: str = "text", empty: bool = False) -> str:
    if not isinstance(given, str) or not (given or empty):
        raise _Wrong(name, f"{name} is {shown(given)}; expected {expected}")
    return given


def _integer(given: object, name: str, least: int, most: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
        limits = f"from {least} to {most}" if most < _MOST_INTEGER else f"of {least} or more"
        raise _Wrong(name, f"{name} is {shown(given)}; expected a whole number {limits}")
    return given


def _number(given: object, name: str, most: float, enough: Callable[[float], bool], least: str) -> float:
    if isinstance(given, int | float) and not isinstance(given, bool) and enough(given) and given <= most:
        return float(given)
    raise _Wrong(name, f"{name} is {shown(given)}; expected a number {least} to {most:g}")
