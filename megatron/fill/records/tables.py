"""Lists of dataclass values stored by column, in memory and in JSON: compact, and quick to add up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, overload


class Table[T](Sequence[T]):
    """A sequence of values of one dataclass, created on access from a column per field, in the order of the fields."""

    def __init__(self, cls: type[T], columns: Mapping[str, list[Any]]) -> None:
        self._cls = cls
        self._columns = columns

    def column(self, name: str) -> list[Any]:
        """Return the values of one field."""
        return self._columns[name]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __iter__(self) -> Iterator[T]:
        return map(self._cls, *self._columns.values())

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Table[T]: ...
    def __getitem__(self, at: int | slice) -> T | Table[T]:
        some = slice(at, at + 1 or None) if isinstance(at, int) else at
        part = Table(self._cls, {name: kept[some] for name, kept in self._columns.items()})
        if isinstance(at, slice):
            return part
        if not len(part):
            raise IndexError(at)
        return next(iter(part))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        return repr(list(self))


def column(values: Sequence[Any], name: str) -> list[Any]:
    """Return one field of all values of a table or any other sequence."""
    return values.column(name) if isinstance(values, Table) else list(map(attrgetter(name), values))


def names_of(cls: type) -> list[str]:
    """Return the names of a dataclass's fields, in order."""
    return [item.name for item in fields(cls)]


def as_columns(cls: type, values: Iterable[Any]) -> dict[str, Sequence[Any]]:
    """Return the columns of values of ``cls`` for JSON; ``cls`` must have more than one field."""
    names = names_of(cls)
    rows = list(map(attrgetter(*names), values))
    return dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {name: [] for name in names}


def extend(columns: dict[str, list[Any]], cls: type, more: Mapping[str, Sequence[Any]]) -> None:
    """Append the ``as_columns`` of more values; ValueError if these are not columns of one length for all fields."""
    names = names_of(cls)
    if list(more) != names or len({len(kept) for kept in more.values()}) != 1:
        raise ValueError(f"the columns of {cls.__name__} are {list(more)}; expected {names}, all of one length")
    for name, kept in more.items():
        columns[name].extend(kept)
