"""Jobs on a terminal: a colour for each state, and text of theirs that cannot command the terminal."""

from __future__ import annotations

import re
import unicodedata

from megatron.fill.types import JobState

_UNUSUAL = re.compile(r"[^ -~\n\t]")
_CARET = 0x40  # ESC is shown as ^[


def state_colour(state: JobState) -> str:
    """The style of a state's name, as rich reads it."""
    match state:
        case JobState.QUEUED:
            return "dim"
        case JobState.RUNNING:
            return "cyan"
        case JobState.SUCCEEDED:
            return "green"
        case JobState.FAILED:
            return "red"
        case JobState.CANCELLED:
            return "yellow"


def one_line(text: str) -> str:
    """The text with a space for each letter that is not to be printed."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def harmless(text: str) -> str:
    """The text with all that could command a terminal made visible; newlines and tabs stay.

    Control characters are shown as ``cat -v`` does (``^[``), others by their number (``\\u202e``).
    """
    return _UNUSUAL.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    letter = match[0]
    if letter.isprintable() or unicodedata.category(letter) == "Zs":  # other spaces than the usual one
        return letter
    number = ord(letter)
    if number < 0x20 or number == 0x7F:
        return f"^{chr(number ^ _CARET)}"
    return letter.encode("unicode_escape").decode("ascii")
