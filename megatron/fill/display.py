"""Jobs on a terminal: tables, colours, amounts, sizes and counts."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.fill.types import JobState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STATE_COLOURS = {  # styles of rich
    JobState.QUEUED: "dim",
    JobState.RUNNING: "cyan",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.CANCELLED: "yellow",
}

_RESULTS, _RESULT = 6, 40  # values printed of one job, and letters of each


_TIMES = ((86400.0, "day", "d"), (3600.0, "hour", "h"), (60.0, "minute", "min"), (1.0, "second", "s"))


def never_fail_to_print() -> None:
    """Escape letters that the encoding of standard output or error does not have, as in the locales of Latin-1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def report_console() -> Console:
    """Return a console for the report, whose tables lose figures below 80 columns; a narrow terminal wraps them."""
    from rich.console import Console

    return Console(width=max(80, Console().width))


def plain_table(*headings: str, gap: int = 2, **style: Any) -> Table:
    """Return an empty table, without lines unless ``style`` (of ``rich``) has some, its columns ``gap`` letters apart.

    A heading that begins with ``>`` puts its column to the right on one line, ``<`` to the left on one line, and any
    other column folds.
    """
    from rich.table import Table

    table = Table(**{"box": None, "padding": (0, gap, 0, 0), "pad_edge": False} | style)
    for heading in headings:
        if heading.startswith((">", "<")):
            table.add_column(heading[1:], justify="right" if heading.startswith(">") else "left", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")
    return table


def size(size_bytes: float) -> str:
    """Return a number of bytes in the largest unit in which it is at least 1, with three digits."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}" if size_bytes < 1000 * unit else f"{size_bytes / unit:.0f} {name}"
    return f"{size_bytes:.0f} bytes"


def mib(size_bytes: int) -> str:
    """Return a number of bytes in whole MiB: for an amount beside its limit, where ``size`` may show both as equal."""
    return f"{size_bytes / (1 << 20):.0f} MiB"


def time_unit(least_s: float) -> tuple[float, str, str]:
    """Return the largest unit of time that is no longer: its seconds, its name, and its sign; a second at least."""
    return next((unit for unit in _TIMES if least_s >= unit[0]), _TIMES[-1])


def amount(value: float) -> str:
    """Return an amount of work: whole from 100 on, with three digits below."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(share: float | None, unknown: str = "-") -> str:
    """Return a share as a percentage; ``unknown`` for None."""
    return unknown if share is None else f"{share:.1%}"


def counted(number: float, noun: str) -> str:
    """Return a number of things, such as ``1 job`` or ``2.5 hours``."""
    return f"{number:,.12g} {noun}{'' if number == 1 else 's'}"


def one_line(text: str) -> str:
    """Return the text with a space in place of each unprintable character."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def results(result: Mapping[str, Any]) -> str:
    """Return the first values that a task reported, on one line."""
    values = [f"{_cut(str(name))} {_value(value)}" for name, value in list(result.items())[:_RESULTS]]
    return ", ".join(values) + (", ..." if len(result) > _RESULTS else "")


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _cut(str(value))


def _cut(text: str) -> str:
    return one_line(text if len(text) <= _RESULT else f"{text[: _RESULT - 3]}...")
