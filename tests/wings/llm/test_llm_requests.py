"""Requests in OpenAI's batch format: what is read, what is refused, and what is no batch at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.errors import ConfigError
from megatron.fill.wings.llm.requests import Refused, Request, read_requests
from megatron.fill.wings.llm.sampling import Sampling


def completion(custom_id: str = "a", **body: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": "Once"} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def chat(custom_id: str = "a", **body: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def embedding(custom_id: str = "a", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": {"input": "Once"} | body}


def asks(arguments: str) -> dict[str, Any]:
    """An answer that calls a tool."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def read(folder: Path, *lines: dict[str, Any]) -> list[Request | Refused]:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_requests(path)


def one(folder: Path, line: dict[str, Any]) -> Request:
    [found] = read(folder, line)
    assert isinstance(found, Request), found
    return found


def test_a_completion_has_openais_defaults(tmp_path: Path) -> None:
    assert one(tmp_path, completion()) == Request(
        line=1,
        custom_id="a",
        chat=False,
        prompts=("Once",),
        messages=(),
        tools=(),
        template={},
        n=1,
        max_tokens=16,
        sampling=Sampling(temperature=1.0),
        seed=None,
        stop=(),
        logprobs=None,
        encoding=None,
        schema=None,
    )


def test_a_chat_goes_as_far_as_the_context_and_its_text_parts_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    found = one(tmp_path, chat(messages=[{"role": "user", "content": parts, "name": "Ada"}]))
    assert found.chat
    assert found.prompts == ()
    assert found.max_tokens is None
    assert found.messages == ({"role": "user", "content": "Hi there", "name": "Ada"},)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("x", ("x",)),
        (["x"], ("x",)),
        ([5, 0], ((5, 0),)),
        ([[5, 0]], ((5, 0),)),
        (["x", "y"], ("x", "y")),
        ([[5], [6, 7], "x"], ((5,), (6, 7), "x")),
    ],
)
def test_prompts_are_texts_or_token_ids(tmp_path: Path, given: object, prompts: object) -> None:
    assert one(tmp_path, completion(prompt=given)).prompts == prompts


def test_what_the_body_asks_for(tmp_path: Path) -> None:
    found = one(tmp_path, completion(n=2, temperature=0, top_p=0.5, seed=-3, stop="\n", logprobs=5, max_tokens=7))
    assert (found.n, found.sampling, found.seed) == (2, Sampling(0.0, 0.5), -3)
    assert [one(tmp_path, completion(seed=seed)).seed for seed in (-(2**63), 2**63 - 1)] == [-(2**63), 2**63 - 1]
    assert (found.stop, found.logprobs, found.max_tokens) == (("\n",), 5, 7)
    found = one(tmp_path, chat(stop=["a", "b"], logprobs=True, top_logprobs=3, max_tokens=9, max_completion_tokens=8))
    assert (found.stop, found.logprobs, found.max_tokens) == (("a", "b"), 3, 8)
    assert one(tmp_path, chat(logprobs=True)).logprobs == 0


def test_fields_that_ask_for_nothing_are_ignored(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "stream": False,
        "tools": [],
        "presence_penalty": 0,
        "stop": None,
    }
    assert one(tmp_path, chat(**nothing)) == one(tmp_path, chat())
    assert one(tmp_path, completion(n=3, best_of=3)).n == 3


def test_how_tokens_are_drawn(tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "repetition_penalty": 1.5,
    }
    found = one(tmp_path, chat(**asked, logit_bias={"3": -100, "0": 1.5}))
    assert found.sampling == Sampling(1.0, 1.0, 5, 0.1, -1.0, 2.0, 1.5, ((3, -100.0), (0, 1.5)))
    assert one(tmp_path, completion(top_k=-1)).sampling == Sampling(1.0)


def test_embeddings(tmp_path: Path) -> None:
    found = one(tmp_path, embedding(input=["x", [1, 2]], model="m", encoding_format="base64", user="u"))
    assert (found.prompts, found.encoding) == (("x", (1, 2)), "base64")
    assert one(tmp_path, embedding()).encoding == "float"
    assert one(tmp_path, completion()).encoding is None


def test_the_form_of_answers(tmp_path: Path) -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    asked = {"type": "json_schema", "json_schema": {"name": "numbers", "strict": True, "schema": schema}}
    assert one(tmp_path, chat(response_format=asked)).schema == schema
    assert one(tmp_path, completion(response_format={"type": "json_object"})).schema == {"type": "object"}
    assert one(tmp_path, chat(response_format={"type": "text"})).schema is None


def test_tools_and_what_only_the_template_knows(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    messages = [asks('{"at": 1}'), {"role": "tool", "tool_call_id": "1", "content": "a tree"}]
    found = one(
        tmp_path,
        chat(tools=tools, messages=messages, chat_template_kwargs={"thinking": False}, reasoning_effort="low"),
    )
    assert found.tools == tuple(tools)
    assert found.template == {"thinking": False, "reasoning_effort": "low"}
    first, second = found.messages
    assert first["content"] == ""
    assert first["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": 1}}
    assert second == messages[1]
    assert one(tmp_path, chat(tools=tools, tool_choice="none")).tools == ()


@pytest.mark.parametrize(
    ("line", "param", "said"),
    [
        (completion() | {"custom_id": 5}, "custom_id", "is 5"),
        (completion() | {"method": "GET"}, "method", "'POST'"),
        (completion() | {"url": "/v1/responses"}, "url", "/v1/embeddings"),
        (embedding(input=[]), "input", "[]"),
        (embedding(input=["a", ""]), "input[1]", "''"),
        (embedding(encoding_format="hex"), "encoding_format", "float or base64"),
        (embedding(dimensions=8), "dimensions", "not supported"),
        (embedding(temperature=1), "temperature", "not supported"),
        (completion() | {"url": ["/v1/completions"]}, "url", "/v1/completions"),
        (completion() | {"body": []}, "body", "a JSON object"),
        (completion(prompt=None), "prompt", "None"),
        (completion(prompt=[]), "prompt", "token ids"),
        (completion(prompt=["a", ""]), "prompt[1]", "''"),
        (completion(prompt=[[1], ["a"]]), "prompt[1]", "whole number"),
        (completion(prompt=["a"] * 2049), "prompt", "at most 2048"),
        (completion(top_k=-2), "top_k", "0 or more"),
        (completion(top_k=1.5), "top_k", "is 1.5"),
        (completion(min_p=1.1), "min_p", "from 0 to 1"),
        (completion(presence_penalty=-2.1), "presence_penalty", "from -2 to 2"),
        (completion(frequency_penalty="1"), "frequency_penalty", "'1'"),
        (completion(repetition_penalty=0), "repetition_penalty", "above 0"),
        (completion(logit_bias=[1]), "logit_bias", "[1]"),
        (completion(logit_bias={"a": 1}), "logit_bias", "'a'"),
        (completion(logit_bias={"-1": 1}), "logit_bias", "'-1'"),
        (completion(logit_bias={"1": 1, "01": 2}), "logit_bias", "different"),
        (completion(logit_bias={"1": 101}), "logit_bias[1]", "from -100 to 100"),
        (completion(tools=[{"type": "function"}]), "tools", "not supported"),
        (completion(reasoning_effort="low"), "reasoning_effort", "not supported"),
        (completion(prompt=[1, -1]), "prompt", "is -1"),
        (completion(model=3), "model", "3"),
        (completion(n=0), "n", "from 1 to 128"),
        (completion(n=True), "n", "is True"),
        (completion(max_tokens=1.5), "max_tokens", "is 1.5"),
        (completion(temperature=2.1), "temperature", "from 0 to 2"),
        (completion(temperature="1"), "temperature", "'1'"),
        (completion(top_p=0), "top_p", "above 0 to 1"),
        (completion(stop=["a"] * 5), "stop", "at most 4"),
        (completion(stop=""), "stop", "''"),
        (completion(logprobs=6), "logprobs", "from 0 to 5"),
        (completion(best_of=2), "best_of", "not supported"),
        (completion(echo=True), "echo", "not supported"),
        (completion(max_completion_tokens=3), "max_completion_tokens", "not supported"),
        (chat(logprobs=3), "logprobs", "true or false"),
        (chat(top_logprobs=3), "top_logprobs", "logprobs to be true"),
        (chat(messages=[]), "messages", "at least one"),
        (chat(messages=["Hi"]), "messages[0]", "'Hi'"),
        (chat(messages=[{"role": "function", "content": "x"}]), "messages[0]", "'function'"),
        (chat(messages=[{"role": "user", "content": "x", "tool_call_id": "1"}]), "messages[0]", "tool_call_id"),
        (chat(messages=[{"role": [], "content": "x"}]), "messages[0]", "[]"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0]", "'text' only"),
        (chat(messages=[{"role": "assistant", "tool_calls": [{}]}]), "messages[0].tool_calls", "'function'"),
        (chat(messages=[asks("[1]")]), "messages[0].tool_calls", "expected a JSON object as text"),
        (chat(messages=[asks("{")]), "messages[0].tool_calls", "expected a JSON object as text"),
        (chat(tools=[{"type": "function"}]), "tools[0]", "of type 'function'"),
        (chat(tools=[{"type": "function", "function": {}}]), "tools[0].function.name", "None"),
        (chat(tools={}), "tools", "a list of functions"),
        (chat(tool_choice="required"), "tool_choice", "auto or none"),
        (chat(chat_template_kwargs=[]), "chat_template_kwargs", "a JSON object"),
        (chat(chat_template_kwargs={"tokenize": False}), "chat_template_kwargs", "'tokenize'"),
        (chat(reasoning_effort="most"), "reasoning_effort", "'most'"),
        (chat(stream=True), "stream", "not supported"),
        (chat(response_format="json"), "response_format", "'json'"),
        (chat(response_format={"type": "xml"}), "response_format", "json_schema"),
        (chat(response_format={"type": "json_schema"}), "response_format", "an object with a schema"),
        (chat(response_format={"type": "json_schema", "json_schema": {"schema": 1}}), "response_format", "schema"),
        (chat(max_tokenz=3), "max_tokenz", "not supported"),
        (chat(seed=2**63), None, "9223372036854775808 is a whole number of more than 64 bits"),
        ({}, "custom_id", "None"),
    ],
)
def test_a_wrong_request_is_refused_and_harms_no_other(
    tmp_path: Path, line: dict[str, Any], param: str | None, said: str
) -> None:
    wrong, right = read(tmp_path, line, completion("other"))
    assert isinstance(wrong, Refused)
    assert isinstance(right, Request)
    assert (wrong.line, wrong.status_code, wrong.param) == (1, 400, param)
    assert said in wrong.message
    assert right.line == 2


def test_the_second_with_a_custom_id_is_refused(tmp_path: Path) -> None:
    first, second = read(tmp_path, completion(), chat())
    assert isinstance(first, Request)
    assert second == Refused(2, "a", "custom_id 'a' is that of line 1 too; expected another", "custom_id")


def test_blank_lines_are_skipped_and_lines_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\ufeff\n" + json.dumps(completion()) + "\r\n \n" + json.dumps(completion("b")))
    assert [found.line for found in read_requests(path)] == [2, 4]


@pytest.mark.parametrize(
    ("data", "where", "said"),
    [
        (b"", "", "is empty"),
        (b"\n\n", "", "is empty"),
        (b"\nprompt\n[1]", ", line 2", "the line is not JSON"),
        (b"[1]\nprompt", ", line 1", "found [1]"),
        (b"null", ", line 1", "found None"),
        (b"\xff\xfe", ", line 1", "the line is not UTF-8"),
    ],
)
def test_a_file_that_is_no_batch_is_an_error(tmp_path: Path, data: bytes, where: str, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as error:
        read_requests(path)
    assert str(error.value).startswith(f"{path}{where}: {said}")
    assert "one JSON object a line" in str(error.value)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_requests(tmp_path / "none.jsonl")
