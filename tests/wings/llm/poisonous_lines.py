"""Lines of a batch that once ended, or might end, the answers to all others."""

from __future__ import annotations

import json
from typing import Any

POISON_ID = "poison"
_FIELDS = ("prompt", "max_tokens", "temperature", "top_p", "seed", "n", "logprobs", "stop", "model")
_VALUES: tuple[Any, ...] = (
    None,
    True,
    "",
    "x",
    [],
    [[]],
    {},
    -1,
    0,
    0.5,
    1e308,
    5e-324,
    2**62,
    -(2**62),
    [1.5],
    ["", ""],
)
_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "1234567890123456789", "1" * 5000, "-0.0", "1E-400")


def line(url: str = "/v1/completions", **body: Any) -> bytes:
    return json.dumps({"custom_id": POISON_ID, "method": "POST", "url": url, "body": body}).encode()


def chat(*messages: Any, **body: Any) -> bytes:
    return line("/v1/chat/completions", messages=list(messages), **body)


def says(content: Any, role: Any = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _with(field: str, value: Any) -> dict[str, Any]:
    return {"prompt": "abc", "max_tokens": 2, field: value}


def poisonous_lines() -> dict[str, bytes]:
    """About 250 lines, by name; none has a line feed in it."""
    found: dict[str, bytes] = {}
    whole = line(prompt="abc", max_tokens=2)
    for at in range(1, len(whole), 9):
        found[f"torn at {at}"] = whole[:at]
    for value in ("NaN", "1", "-1e5", "null", "true", '"text"', "[]", "[{}]", "{}", "{,}", "{'a': 1}", "prompt"):
        found[f"not a request: {value}"] = value.encode()
    found |= {
        "not UTF-8": b'{"custom_id": "poison", "prompt": "\xff\xfe"}',
        "UTF-16": whole.decode().encode("utf-16").replace(b"\n", b""),
        "a zero byte": whole.replace(b"abc", b"a\0c"),
        "a byte order mark": b"\xef\xbb\xbf" + whole,
        "a carriage return": whole.replace(b",", b",\r"),
        "two objects": whole + whole,
        "longer than is read": b'{"custom_id": "poison", "body": "' + b"x" * (17 << 20) + b'"}',
        "deep lists": b"[" * 100_000,
        "deep objects": b'{"custom_id": "poison", "body": ' + b'{"a":' * 40 + b"1" + b"}" * 40 + b"}",
        "too many values": b'{"custom_id": "poison", "body": [' + b"1," * 2_000_001 + b"1]}",
        "a name twice": whole.replace(b'"method"', b'"custom_id": "other", "method"'),
        "a body twice": whole[:-1] + b', "body": {}}',
        "a lone surrogate": whole.replace(b"abc", rb"\ud800"),
        "an id of a lone surrogate": whole.replace(b"poison", rb"\udfff"),
        "an id that is a number": whole.replace(b'"poison"', b"7"),
        "an id of 100,000 letters": whole.replace(b"poison", b"p" * 100_000),
        "no method": whole.replace(b"POST", b"GET"),
        "another url": whole.replace(b"/v1/completions", b"/v1/images"),
        "a url that is a list": whole.replace(b'"/v1/completions"', b"[]"),
        "a body that is text": json.dumps(
            {"custom_id": POISON_ID, "method": "POST", "url": "/v1/completions", "body": "x"}
        ).encode(),
    }
    for field in _FIELDS:
        for value in _VALUES:
            found[f"{field} is {value!r}"] = line(**_with(field, value))
    for field in ("temperature", "top_p", "seed", "n", "max_tokens", "logprobs"):
        for number in _NUMBERS:
            data = line(**_with(field, "?"))
            found[f"{field} is {number[:24]}"] = data.replace(b'"?"', number.encode())
    few: dict[str, Any] = {"max_tokens": 2}
    found |= {
        "an id beyond the embedding": line(prompt=[1, 40], **few),
        "an id far beyond": line(prompt=[2**31], **few),
        "an id of 63 bits": line(prompt=[2**62], **few),
        "an added token": line(prompt="ab~c", **few),
        "an empty prompt": line(prompt="", **few),
        "a prompt of letters that are none": line(prompt="\u4e2d\U0001f600", **few),
        "a prompt of NUL": line(prompt="\0" * 5, **few),
        "a prompt that is too long": line(prompt="a" * 5000, **few),
        "NaN logits": line(prompt="abMc", temperature=0, **few),
        "NaN logits, sampled": line(prompt="abMc", n=3, **few),
        "NaN logits with logprobs": line(prompt="abMc", logprobs=3, **few),
        "NaN logits after a while": line(prompt="M", max_tokens=9, logprobs=0, stop=["a"]),
        "a temperature that is next to 0": line(prompt="abc", temperature=1e-310, logprobs=2, **few),
        "a top_p that is next to 0": line(prompt="abc", top_p=1e-310, logprobs=2, **few),
        "a stop of 10,000 letters": line(prompt="abc", stop="a" * 10_000, **few),
        "128 choices": line(prompt="abc", n=128, max_tokens=1),
        "a template without tokens": chat(says("nothing"), **few),
        "a template that raises": chat(says("raise"), **few),
        "a template that divides by zero": chat(says("zero"), **few),
        "a chat of an added token": chat(says("a~"), **few),
        "a chat of NaN": chat(says("M"), logprobs=True, top_logprobs=2, **few),
        "no messages": chat(**few),
        "a message that is text": chat("hello", **few),
        "a role that is a list": chat(says("a", role=[]), **few),
        "content that is a number": chat(says(5), **few),
        "content in parts of nothing": chat(says([{}]), **few),
        "content in a part without text": chat(says([{"type": "text"}]), **few),
        "content of an image": chat(says([{"type": "image_url", "image_url": {"url": "x"}}]), **few),
        "a name that is a number": chat(says("a", name=3), **few),
        "a bias for a token that is none": line(prompt="abc", logit_bias={"40": 1}, **few),
        "a bias against every token": line(prompt="abc", logit_bias={str(at): -100 for at in range(40)}, **few),
        "500 prompts, one wrong": line(prompt=["a"] * 500 + [[99]], max_tokens=1),
        "prompts of two kinds": line(prompt=["a", [1], [[1]]], **few),
        "penalties and NaN": line(prompt="abMc", repetition_penalty=1.5, presence_penalty=-2, **few),
        "tools that are text": chat(says("a"), tools=["x"], **few),
        "a template's argument that breaks it": chat(says("a"), chat_template_kwargs={"messages": 5}, **few),
        "arguments of the tokenizer": chat(says("a"), chat_template_kwargs={"tokenize": False}, **few),
        "other arguments of the tokenizer": chat(says("a"), chat_template_kwargs={"return_dict": True}, **few),
        "tool calls": chat(says("a", tool_calls=[{"id": 1}]), **few),
        "no content": chat({"role": "assistant"}, **few),
        "empty content": chat(says(""), **few),
        "500 messages": chat(*[says("a")] * 500, **few),
    }
    return found
