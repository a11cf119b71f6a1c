"""The terminal of a command: consoles, tables, progress, and jobs' text with control characters escaped."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron.fill.display import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

_UNUSUAL = re.compile(r"[^ -~\n\t]")
_CARET = 0x40  # ESC is shown as ^[


def console_of(pipe_width: int | None = None) -> Console:
    """Return a console as wide as the terminal or ``COLUMNS``; ``pipe_width`` or 80 columns where there is neither."""
    from rich.console import Console

    free = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=pipe_width if free else None, highlight=False)


def progress(quiet: bool) -> Progress:
    """Return a bar with counts and the time, on standard error; it shows nothing if ``quiet``."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(file=sys.stderr), disable=quiet)


def facts_table(facts: Iterable[tuple[str, Text]]) -> Table:
    """Return a table of names and what is said of them, which is folded."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for fact in facts:
        table.add_row(*fact)
    return table


def literal(text: str, style: str = "") -> Text:
    """Return text for ``rich`` without markup, on one line (``one_line``)."""
    from rich.text import Text

    return Text(one_line(text), style=style)


def harmless(text: str) -> str:
    """Return the text with control characters made visible; newlines and tabs stay.

    ASCII control characters are shown as by ``cat -v`` (``^[``), other unprintable ones by their number (``\\u202e``).
    """
    return _UNUSUAL.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    letter = match[0]
    if letter.isprintable() or unicodedata.category(letter) == "Zs":  # Unicode spaces
        return letter
    number = ord(letter)
    if number < 0x20 or number == 0x7F:
        return f"^{chr(number ^ _CARET)}"
    return letter.encode("unicode_escape").decode("ascii")
