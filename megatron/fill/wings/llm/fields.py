"""Fields of a request, each checked and named in the error; among them those that say how its tokens are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.fill.given.problems import shown
from megatron.fill.wings.llm.sampling import Sampling

MOST_INTEGER = 2**63 - 1
SAMPLING_FIELDS = {
    *("temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
}
_MOST_BIASES = 1024


class WrongFieldError(Exception):
    """A field of a request that is wrong; ``param`` is its name, None for the whole request."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


def wrong(name: str, given: object, expected: str) -> WrongFieldError:
    """The error for a field with another value than expected."""
    return WrongFieldError(name, f"{name} is {shown(given)}; expected {expected}")


def text(given: object, name: str, expected: str = "text", empty: bool = False) -> str:
    """A text; empty only if that is allowed."""
    if not isinstance(given, str) or not (given or empty):
        raise wrong(name, given, expected)
    return given


def integer(given: object, name: str, least: int, most: int) -> int:
    """A whole number within limits."""
    if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
        limits = f"from {least} to {most}" if most < MOST_INTEGER else f"of {least} or more"
        raise wrong(name, given, f"a whole number {limits}")
    return given


def number(given: object, name: str, least: float, most: float, above: bool = False) -> float:
    """A number within limits; ``above`` leaves the least one out."""
    if (
        not isinstance(given, int | float)
        or isinstance(given, bool)
        or not least <= given <= most
        or (above and given == least)
    ):
        raise wrong(name, given, f"a number {'above' if above else 'from'} {least:g} to {most:g}")
    return float(given)


def read_sampling(body: Mapping[str, Any]) -> Sampling:
    """The fields, with OpenAI's and vLLM's defaults; WrongFieldError if one is wrong."""
    top_k = body.get("top_k", 0)
    return Sampling(
        temperature=number(body.get("temperature", 1), "temperature", 0, 2),
        top_p=number(body.get("top_p", 1), "top_p", 0, 1, above=True),
        top_k=0 if top_k == -1 else integer(top_k, "top_k", 0, MOST_INTEGER),  # vLLM has both for all tokens
        min_p=number(body.get("min_p", 0), "min_p", 0, 1),
        presence_penalty=number(body.get("presence_penalty", 0), "presence_penalty", -2, 2),
        frequency_penalty=number(body.get("frequency_penalty", 0), "frequency_penalty", -2, 2),
        repetition_penalty=number(body.get("repetition_penalty", 1), "repetition_penalty", 0, 100, above=True),
        logit_bias=_bias(body.get("logit_bias", {})),
    )


def _bias(given: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(given, dict) or len(given) > _MOST_BIASES:
        raise wrong("logit_bias", given, f"an object of at most {_MOST_BIASES} token ids")
    found = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and int(token) <= MOST_INTEGER) or int(token) in found:
            raise WrongFieldError("logit_bias", f"logit_bias has {shown(token)}; expected different token ids")
        found[int(token)] = number(bias, f"logit_bias[{token}]", -100, 100)
    return tuple(found.items())


def read_schema(given: object) -> Mapping[str, Any] | None:
    """The schema that ``response_format`` asks for; None for any text; WrongFieldError if it is wrong."""
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(given, dict) or kind not in ("text", "json_object", "json_schema"):
        raise wrong("response_format", given, "an object with type text, json_object or json_schema")
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise WrongFieldError(
            "response_format", f"response_format.json_schema is {shown(inner)}; expected an object with a schema"
        )
    return schema
