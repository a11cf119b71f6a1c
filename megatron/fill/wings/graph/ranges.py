"""Device numbers as text: ``0-2,5``."""

from __future__ import annotations

import re

from megatron.fill.errors import GraphError


def say_ranges(numbers: tuple[int, ...]) -> str:
    """Return numbers as ranges: ``0-2,5`` for 0, 1, 2 and 5, and ``none`` for none."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs) or "none"


def parse_ranges(text: str, line: int) -> tuple[int, ...]:
    """Parse the text that ``say_ranges`` returns.

    Raises:
        GraphError: the text does not have this form; the error has the line's number.
    """
    if text == "none":
        return ()
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None:
            raise GraphError(f"line {line}: devices are {text!r}; expected such as 0-2,5")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(found)
