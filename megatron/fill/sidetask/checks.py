"""Checks of a task's arguments from the jobs file."""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_whole(**arguments: tuple[object, int]) -> None:
    """Raise a ValueError for a value that is no whole number from ``least`` on, given as ``name=(value, least)``."""
    for name, (value, least) in arguments.items():
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}: expected a whole number of at least {least}")


def whole_numbers(name: str, given: list[int] | None, default: Sequence[int]) -> list[int]:
    """Return a list of whole numbers from 1, or the default for None; ValueError if it is empty, or a value wrong."""
    for value in given or []:
        check_whole(**{name: (value, 1)})
    if given == []:
        raise ValueError(f"{name} is []: expected at least one, or none at all")
    return list(default if given is None else given)


def check_texts(**arguments: object) -> None:
    """Raise a ValueError for a value that is no list of texts, as a single text is none."""
    for name, value in arguments.items():
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ValueError(f"{name} is {value!r}: expected a list of texts")


def divisors(name: str, given: list[int] | None, size: int) -> list[int]:
    """Return divisors of ``size``, the largest first, all for None; ValueError if one is none, or the list empty."""
    found = [value for value in range(size, 0, -1) if size % value == 0]
    for value in whole_numbers(name, given, found):
        if value not in found:
            raise ValueError(f"{name} is {given}: expected divisors of batch_size {size}; {value} is not")
    return [value for value in found if given is None or value in given]


def check_number(name: str, value: object, below: float = math.inf) -> None:
    """Raise a ValueError for a value that is not a number of at least 0 and less than ``below``."""
    if not isinstance(value, int | float) or not 0 <= value < below:
        raise ValueError(f"{name} is {value!r}: expected a number of at least 0 and below {below:g}")
