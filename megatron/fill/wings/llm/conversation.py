"""Inputs of a chat's template: messages, tools, and arguments of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron.fill.given.problems import shown
from megatron.fill.wings.llm.fields import WrongFieldError, text, wrong

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {"assistant": {"tool_calls"}, "tool": {"tool_call_id"}}  # besides role, content and name
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_TAKEN = {  # arguments of the template that are the request's other fields, or of the call and not of the template
    *("messages", "conversation", "tools", "documents", "reasoning_effort", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs"),
}


def read_messages(given: object) -> tuple[dict[str, Any], ...]:
    """The messages of a chat, the parts of each one's text joined; WrongFieldError if one is none."""
    if not isinstance(given, list) or not given:
        raise wrong("messages", given, "a list with at least one message")
    return tuple(_message(message, f"messages[{place}]") for place, message in enumerate(given))


def read_tools(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The tools that the template is given: none if ``tool_choice`` is ``none``.

    Raises:
        WrongFieldError: one is none, or another choice is asked for.
    """
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise wrong("tool_choice", choice, "auto or none: a call cannot be enforced")
    given = body.get("tools", [])
    if not isinstance(given, list):
        raise wrong("tools", given, "a list of functions")
    for place, tool in enumerate(given):
        where = f"tools[{place}]"
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise wrong(where, tool, "an object of type 'function'")
        text(tool["function"].get("name"), f"{where}.function.name")
    return () if choice == "none" else tuple(given)


def read_template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Read the template's further arguments: ``chat_template_kwargs`` and ``reasoning_effort``.

    Raises:
        WrongFieldError: one of them is wrong.
    """
    given = body.get("chat_template_kwargs", {})
    if not isinstance(given, dict):
        raise wrong("chat_template_kwargs", given, "a JSON object")
    if taken := sorted(_TAKEN & set(given)):
        raise WrongFieldError(
            "chat_template_kwargs",
            f"chat_template_kwargs has {shown(taken[0])}; expected names that are only the template's",
        )
    effort = body.get("reasoning_effort")
    if effort is None:
        return dict(given)
    if effort not in _EFFORTS:
        raise wrong("reasoning_effort", effort, f"one of {', '.join(_EFFORTS)}")
    return given | {"reasoning_effort": effort}


def _message(given: object, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise wrong(where, given, "a JSON object with role and content")
    role = given.get("role")
    if role not in _ROLES:
        raise WrongFieldError(where, f"{where}: role is {shown(role)}; expected one of {', '.join(_ROLES)}")
    own = _FIELDS.get(role, set())
    for name, value in given.items():
        if name not in {"role", "content", "name", *own} and value not in (None, [], {}):
            raise WrongFieldError(
                where, f"{where}: {shown(name)} is {shown(value)}: this is not supported; leave it out"
            )
    found: dict[str, Any] = {"role": role}
    calls = given.get("tool_calls") if role == "assistant" else None
    if calls:
        found["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    if calls and given.get("content") is None:
        found["content"] = ""  # templates add to it
    else:
        found["content"] = _content(given.get("content"), where)
    for name in ("name", *(own & {"tool_call_id"})):
        if given.get(name) is not None:
            found[name] = text(given[name], f"{where}.{name}")
    return found


def _content(given: object, where: str) -> str:
    if isinstance(given, list) and given:  # in parts
        for part in given:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise WrongFieldError(where, f"{where}: content has {shown(part)}; expected parts of type 'text' only")
        given = "".join(text(part.get("text"), f"{where}.content", empty=True) for part in given)
    return text(given, f"{where}.content", empty=True)


def _calls(given: object, where: str) -> list[dict[str, Any]]:
    """The calls of an earlier answer; templates expect the arguments as an object, and OpenAI has them as a text."""
    if not isinstance(given, list):
        raise wrong(where, given, "a list of calls")
    found = []
    for place, call in enumerate(given):
        inner = call.get("function") if isinstance(call, dict) else None
        if not isinstance(call, dict) or call.get("type", "function") != "function" or not isinstance(inner, dict):
            raise WrongFieldError(where, f"{where}[{place}] is {shown(call)}; expected a call of type 'function'")
        name = text(inner.get("name"), f"{where}[{place}].function.name")
        arguments = inner.get("arguments", "{}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                arguments = None
        if not isinstance(arguments, dict):
            raise WrongFieldError(
                where,
                f"{where}[{place}].function.arguments is {shown(inner['arguments'])}; expected a JSON object as text",
            )
        found.append(call | {"type": "function", "function": {"name": name, "arguments": arguments}})
    return found
