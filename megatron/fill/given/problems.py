"""What is wrong with a value that a user gave, in one line: where it is, what was found, what was expected."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

type Place = Sequence[str | int]  # keys and positions, from the outside in

MOST_TOLD = 20  # problems of one file
_MOST_LETTERS = 60  # of a value
_short = reprlib.Repr(maxlevel=4, maxdict=10, maxlist=10, maxtuple=10, maxstring=_MOST_LETTERS)
_short.maxother = _MOST_LETTERS


def shown(value: object) -> str:
    """A value as it is quoted in a message."""
    text = _short.repr(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


_WORDS = {  # for pydantic's own, which are about Python
    **dict.fromkeys(("model_type", "model_attributes_type", "dataclass_type", "dict_type"), "expected a mapping"),
    **dict.fromkeys(("list_type", "tuple_type"), "expected a list"),
    "string_type": "expected text; in quotes, if it looks like a number or a switch",
}


def expectation(problem: Mapping[str, Any]) -> str:
    """What was expected instead, of one of pydantic's findings."""
    if problem["type"] in _WORDS:
        return _WORDS[problem["type"]]
    return reworded(problem["msg"])


def reworded(message: str) -> str:
    """A message of pydantic's, or of typer's around one, in the words of all others."""
    return message.replace("Value error, ", "", 1).replace("Input should be", "expected", 1)


def explain(
    error: ValidationError,
    model: type[BaseModel],
    where: Callable[[Place], tuple[str, Place]],
    suffix: str = "",
    most: int = MOST_TOLD,
) -> str:
    """Pydantic's findings, the first ``most`` of them, a line each.

    Args:
        model: what was validated.
        where: what a line begins with, given the place of the problem, and the part of the place that it leaves to say.
        suffix: what it ends with.
    """
    # A list with a wrong entry counts as too short as well.
    found = [its for its in error.errors() if its["type"] != "too_short" or not its["input"]]
    lines = [_line(problem, model, where) + suffix for problem in found[:most]]
    more = len(found) - len(lines)
    return "\n".join(lines) + (f" (and {more} more such problems)" if more else "")


def _line(problem: Any, model: type[BaseModel], where: Callable[[Place], tuple[str, Place]]) -> str:
    begin, rest = where(problem["loc"])
    field = ".".join(str(part) for part in rest if part != "[key]")
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        fields = _fields(model, problem["loc"][:-1])
        return f"{begin}: unknown field {field}" + (f"; expected one of {', '.join(fields)}" if fields else "")
    if problem["type"] == "missing":
        return f"{begin}: {field} is missing"
    if problem["type"] == "value_error" and isinstance(problem["input"], dict | list) and problem["input"]:
        # It says what in there is wrong.
        return f"{begin}: {field + ': ' if field else ''}{expectation(problem)}"
    return f"{begin}: {field + ' is' if field else 'found'} {shown(problem['input'])}: {expectation(problem)}"


def _fields(model: type[BaseModel], place: Place) -> list[str]:
    """The fields that there can be at a place; none if that is not known."""
    with warnings.catch_warnings(action="ignore"):  # of defaults that JSON cannot say
        whole = model.model_json_schema()
    schemas = [whole]
    for part in [*place, None]:
        found = []
        for schema in schemas:  # what may stand there: a type, or one of several
            for one in [schema, *schema.get("anyOf", ())]:
                one = whole["$defs"][one["$ref"].rpartition("/")[2]] if "$ref" in one else one
                if part is None:
                    found += [one] if "properties" in one else []
                elif isinstance(part, int):
                    found += [one["items"]] if isinstance(one.get("items"), dict) else []
                elif part in one.get("properties", {}):
                    found.append(one["properties"][part])
        schemas = found
    return list(schemas[0]["properties"]) if schemas else []
