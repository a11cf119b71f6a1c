"""Checks of the arguments that a jobs file gives a task."""

from __future__ import annotations

import math


def check_whole(**arguments: tuple[object, int]) -> None:
    """Check whole numbers, given as ``name=(value, least)``.

    Raises:
        ValueError: naming the argument, its value, and what was expected.
    """
    for name, (value, least) in arguments.items():
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}: expected a whole number of at least {least}")


def check_number(name: str, value: object, below: float = math.inf) -> None:
    """Check that ``value`` is a number of at least 0 and less than ``below``.

    Raises:
        ValueError: naming the argument, its value, and what was expected.
    """
    if not isinstance(value, int | float) or not 0 <= value < below:
        raise ValueError(f"{name} is {value!r}: expected a number of at least 0 and below {below:g}")
