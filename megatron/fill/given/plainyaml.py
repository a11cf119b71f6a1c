"""YAML as plain data: values that JSON has too, without repeated keys, of bounded size, with the line of each value.

libyaml parses the text into events; this module interprets them in one pass.  PyYAML's own loaders accept repeated
keys and follow aliases without a limit, so that valid-looking files can exhaust time or the C stack.

Unlike YAML 1.1, dates stay text, and ``1e-4`` is a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.nodes import ScalarNode

MOST_DEPTH = 32  # levels of nested lists and mappings, with aliases followed
MOST_VALUES = 1_000_000  # values in all, with aliases followed

READER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may have been built without libyaml
_TAG = "tag:yaml.org,2002:"
_OWN = SafeConstructor()
_SCALARS = {
    f"{_TAG}null": lambda node: None,
    f"{_TAG}bool": _OWN.construct_yaml_bool,
    f"{_TAG}int": _OWN.construct_yaml_int,
    f"{_TAG}float": _OWN.construct_yaml_float,
}
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_MOST_DIGITS = 80  # a 64-bit number has fewer in any base
_WORD = 1 << 64


class PlainYamlError(ValueError):
    """A text is not YAML as it is accepted here, in ``line`` from 1; None if that is unknown."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True, slots=True)
class PlainYaml:
    """The value of a text, and the lines of its parts."""

    value: Any  # dicts, lists, strings, numbers, booleans and None
    lines: Mapping[int, Mapping[Any, int]] = field(default_factory=dict)  # of each entry, by the ``id`` of its parent

    def line_of(self, path: Sequence[str | int]) -> int | None:
        """Return the line of the value at a path, or of the innermost existing parent; None if there is none."""
        line, place = None, self.value
        for part in path:
            inside = self.lines.get(id(place), {})
            if part not in inside:
                break
            line, place = inside[part], place[part]
        return line

    def placed(self, source: object, path: Sequence[str | int]) -> str:
        """Return the source's name, with the line of the value at a path as far as it is known."""
        line = self.line_of(path)
        return f"{source}" if line is None else f"{source}, line {line}"


def parse_yaml(text: str, reader: Any = READER) -> PlainYaml:
    """Return the value of a text with one document; None as the value of an empty text.

    Raises:
        PlainYamlError: the text is not YAML; has repeated keys, tags, infinite numbers or ones of more than 64 bits;
            refers to itself; or exceeds ``MOST_DEPTH`` or ``MOST_VALUES``.
    """
    read = _Reader(text, reader)
    try:
        return PlainYaml(read.document(), read.lines)
    except yaml.MarkedYAMLError as error:
        line = None if error.problem_mark is None else error.problem_mark.line + 1
        # libyaml (from PyYAML 6.0.4 on) has its own limit, and looks ahead, so it may reach that one first.
        if error.problem == "exceeded maximum nesting depth":
            raise _too_deep(line) from error
        raise PlainYamlError(f"is not YAML: {error.problem}", line) from error
    except yaml.YAMLError as error:
        raise PlainYamlError(f"is not YAML: {' '.join(str(error).split())}") from error
    except UnicodeError as error:
        raise PlainYamlError("is not YAML: it is not text") from error


class _Reader:
    def __init__(self, text: str, reader: Any) -> None:
        self.lines: dict[int, dict[Any, int]] = {}
        self._events: Iterator[Any] = yaml.parse(text, Loader=reader)
        self._anchors: dict[str, tuple[Any, int, int]] = {}  # the value, its depth and size
        self._values = 0

    def document(self) -> Any:
        next(self._events)  # the stream's start
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return None
        value, _ = self._value(next(self._events), 0)
        next(self._events)  # the document's end
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise PlainYamlError("has a second document; expected one", _line(after))
        return value

    def _value(self, event: Any, depth: int) -> tuple[Any, int]:
        """Return the value that begins with an event, in a list or mapping of this depth, and its number of levels."""
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise PlainYamlError(f"*{event.anchor} refers to nothing above it, or to itself", _line(event))
            value, levels, size = self._anchors[event.anchor]
            self._check(event, depth + levels, size)
            return value, levels
        before = self._values
        self._check(event, depth, 1)
        value, levels = None, 0
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
        elif event.tag not in (None, "!", f"{_TAG}map", f"{_TAG}seq"):
            raise _tagged(event)
        else:
            self._check(event, depth + 1, 0)
            inside = self._mapping if isinstance(event, yaml.MappingStartEvent) else self._list
            value, levels = inside(depth + 1)
        if event.anchor is not None:
            self._anchors[event.anchor] = value, levels, self._values - before
        return value, levels

    def _check(self, event: Any, depth: int, size: int) -> None:
        self._values += size
        if self._values > MOST_VALUES:
            raise PlainYamlError(f"has more than {MOST_VALUES} values, its aliases followed", _line(event))
        if depth > MOST_DEPTH:
            raise _too_deep(_line(event))

    def _list(self, depth: int) -> tuple[list[Any], int]:
        value: list[Any] = []
        lines = self.lines[id(value)] = {}
        deepest = 0
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            lines[len(value)] = _line(event)
            entry, levels = self._value(event, depth)
            value.append(entry)
            deepest = max(deepest, levels)
        return value, deepest + 1

    def _mapping(self, depth: int) -> tuple[dict[Any, Any], int]:
        value: dict[Any, Any] = {}
        lines = self.lines[id(value)] = {}
        merged: list[dict[Any, Any]] = []
        deepest = 0
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            line = _line(event)
            if not isinstance(event, yaml.ScalarEvent):
                raise PlainYamlError("a key is a list, a mapping or an alias; expected a word", line)
            key = self._scalar(event)
            entry, levels = self._value(next(self._events), depth)
            deepest = max(deepest, levels)
            if key == "<<" and event.implicit[0]:
                merged += _mappings(entry, line)
            elif key in value:
                raise PlainYamlError(f"{key!r} is there twice, also in line {lines[key]}; expected it once", line)
            else:
                value[key], lines[key] = entry, line
        for other in merged:
            for key in other.keys() - value.keys():
                value[key], lines[key] = other[key], self.lines[id(other)][key]
        return value, deepest + 1

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        if event.tag is not None:
            if event.tag not in ("!", f"{_TAG}str"):
                raise _tagged(event)
            return event.value
        if not event.implicit[0]:  # quoted
            return event.value
        try:
            return _plain(event.value)
        except ValueError as error:
            raise PlainYamlError(str(error), _line(event)) from None


@lru_cache(maxsize=4096)
def _plain(text: str) -> Any:
    """Return the value of an unquoted scalar; ValueError if it is infinite or has more than 64 bits."""
    for tag, pattern in yaml.SafeLoader.yaml_implicit_resolvers.get(text[:1], ()):
        if tag in _SCALARS and pattern.match(text):
            break
    else:
        if not _EXPONENT.fullmatch(text):
            return text
        tag = f"{_TAG}float"
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits; expected one of 64 bits")
    try:
        value = _SCALARS[tag](ScalarNode(tag, text))
    except ValueError:  # such as 0b_
        return text
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{text} is not a finite number; expected one")
    if isinstance(value, int) and abs(value) >= _WORD:
        raise ValueError(f"{text} is a whole number of more than 64 bits; expected a smaller one")
    return value


def _mappings(entry: Any, line: int) -> list[dict[Any, Any]]:
    """Return the mappings that ``<<`` merges, in order of precedence."""
    found = entry if isinstance(entry, list) else [entry]
    if not all(isinstance(one, dict) for one in found):
        raise PlainYamlError("<< takes a mapping, or a list of them", line)
    return found


def _line(event: Any) -> int:
    return event.start_mark.line + 1


def _tagged(event: Any) -> PlainYamlError:
    tag = event.tag.replace(_TAG, "!!")
    return PlainYamlError(f"the tag {tag}; expected plain data", _line(event))


def _too_deep(line: int | None) -> PlainYamlError:
    return PlainYamlError(f"is nested deeper than {MOST_DEPTH} levels", line)
