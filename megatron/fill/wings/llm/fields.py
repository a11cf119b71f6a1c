"""Single values of a request, each checked and named in the error."""

from __future__ import annotations

from collections.abc import Callable

from megatron.fill.given.problems import shown

MOST_INTEGER = 2**63 - 1


class WrongFieldError(Exception):
    """A field of a request that is wrong.

    Attributes:
        param: the field's name; None if it is the whole request.
    """

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


def text(given: object, name: str, expected: str = "text", empty: bool = False) -> str:
    """A text; empty only if that is allowed."""
    if not isinstance(given, str) or not (given or empty):
        raise WrongFieldError(name, f"{name} is {shown(given)}; expected {expected}")
    return given


def integer(given: object, name: str, least: int, most: int) -> int:
    """A whole number within limits."""
    if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
        limits = f"from {least} to {most}" if most < MOST_INTEGER else f"of {least} or more"
        raise WrongFieldError(name, f"{name} is {shown(given)}; expected a whole number {limits}")
    return given


def number(given: object, name: str, most: float, enough: Callable[[float], bool], least: str) -> float:
    """A number up to ``most``.

    Args:
        enough: returns True if a number is large enough; ``least`` is the same in words.
    """
    if isinstance(given, int | float) and not isinstance(given, bool) and enough(given) and given <= most:
        return float(given)
    raise WrongFieldError(name, f"{name} is {shown(given)}; expected a number {least} to {most:g}")
