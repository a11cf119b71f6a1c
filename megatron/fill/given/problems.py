"""Error messages for users' values, of one line each: the place, the value found, and what was expected."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

type Place = Sequence[str | int]  # keys and positions, from the outside in

MOST_TOLD = 20  # problems reported of one file
_MOST_LETTERS = 60  # letters quoted of a value
_short = reprlib.Repr(maxlevel=4, maxdict=10, maxlist=10, maxtuple=10, maxstring=_MOST_LETTERS)
_short.maxother = _MOST_LETTERS


def shown(value: object) -> str:
    """Return a value as it is quoted in a message."""
    text = _short.repr(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


_WORDS = {  # replacements of pydantic's messages that speak of Python types
    **dict.fromkeys(("model_type", "model_attributes_type", "dataclass_type", "dict_type"), "expected a mapping"),
    **dict.fromkeys(("list_type", "tuple_type"), "expected a list"),
    "too_short": "expected at least one",
    "path_type": "expected the path of a file",
    "string_type": "expected text; in quotes, if it looks like a number or a switch",
}


def expectation(problem: Mapping[str, Any]) -> str:
    """Return the text on what was expected, for one of pydantic's errors."""
    return _WORDS.get(problem["type"]) or reworded(problem["msg"])


def reworded(message: str) -> str:
    """Return a message of pydantic, or of typer around one, in the style of PipeFill's own messages."""
    return message.replace("Value error, ", "", 1).replace("Input should be", "expected", 1)


def explain(
    error: ValidationError,
    model: type[BaseModel],
    where: Callable[[Place], tuple[str, Place]],
    suffix: str = "",
    most: int = MOST_TOLD,
) -> str:
    """Return a line for each of the first ``most`` errors that pydantic found in a ``model``.

    ``where`` maps the place of an error to the beginning of its line and the rest of the place, which follows it.
    """
    # pydantic reports a list with a wrong entry as too short as well.
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
        # The message itself names the part that is wrong.
        return f"{begin}: {field + ': ' if field else ''}{expectation(problem)}"
    return f"{begin}: {field + ' is' if field else 'found'} {shown(problem['input'])}: {expectation(problem)}"


def _fields(model: type[BaseModel], place: Place) -> list[str]:
    """Return the names of the fields allowed at a place; empty if they are unknown."""
    with warnings.catch_warnings(action="ignore"):  # warnings about defaults that JSON cannot represent
        whole = model.model_json_schema()
    schemas = [whole]
    for part in [*place, None]:
        found = []
        for schema in schemas:  # the types allowed there: one, or several
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
