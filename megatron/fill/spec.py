"""Messages between PipeFill's own processes: frozen dataclasses whose JSON form follows from their types."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Self, cast, get_args, get_origin, get_type_hints


class Spec:
    """Base of a dataclass that is passed between processes as JSON.

    Its fields have types of JSON, enums, dataclasses, lists and tuples of one such type, or optional ones.
    """

    __slots__ = ()

    def to_json(self) -> str:
        """Return the text for ``from_json``."""
        return json.dumps(asdict(cast(Any, self)))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the value from the text of ``to_json``; the text is trusted, so nothing is checked."""
        found: Self = typed(cls, json.loads(text))
        return found


def typed(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the type ``kind``.

    Raises:
        KeyError, TypeError, ValueError: a dataclass has no such field or lacks one, or an enum has no such member.
    """
    return _reader(kind)(value)


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return what converts a value to the type ``kind``, made once for each: a store reads thousands of jobs."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        inner = _reader(next(part for part in parts if part is not NoneType))
        return lambda value: None if value is None else inner(value)
    if origin in (list, tuple):
        inner = _reader(parts[0])
        return lambda value: origin(map(inner, value))
    if is_dataclass(kind):
        make: Any = kind
        readers = {name: _reader(one) for name, one in get_type_hints(make).items()}
        return lambda value: make(**{name: readers[name](one) for name, one in value.items()})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    return lambda value: value
