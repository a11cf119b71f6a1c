"""The only readers of data that a job can write: files in its folder, its profile, its last message.

A job may have put a link there, a pipe that blocks its reader forever, a flood, or JSON made to break its reader.
Every other process (agent, report, commands) reads such data through this module only.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 32 << 20  # size of a file
MOST_JSON_BYTES = 8 << 20  # size of a JSON file
MOST_DEPTH = 32  # levels of nested lists and objects
MOST_VALUES = 1_000_000
_MOST_LETTERS = 1000  # length of a reason, or a unit
_MOST_DIGITS = 19  # digits of a whole number of 64 bits, at most
_SHOWN_LETTERS = 40  # of a text before what is wrong in it
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_STRING = re.compile(r'"[^"]*"?')
_BRACKET = re.compile(r"[\[\]{}]")


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file, following no symbolic link in its own or its folder's name; OSError if that fails."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fd = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    file = os.fdopen(fd, "rb")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        file.close()
        raise OSError(f"{path} is not a plain file")
    return file


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a plain file; OSError as ``open_plain``, ValueError if it is too large or not UTF-8."""
    with open_plain(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"{path} is larger than {most_bytes} bytes")
    return data.decode("utf-8")


def read_json(path: Path) -> Any:
    """Return the value of a plain JSON file; OSError or ValueError as ``read_text`` and ``parse_json``."""
    return parse_json(read_text(path, MOST_JSON_BYTES))


def parse_json(text: str | bytes, most_depth: int = MOST_DEPTH, most_values: int = MOST_VALUES) -> Any:
    """Return the value of a JSON text, which can be written as UTF-8 again and which every database accepts.

    Raises:
        ValueError: (the only error) the text is not JSON, is nested too deep or has too many values, or holds NaN, an
            infinity (``1e400`` too), a whole number of more than 64 bits, a lone surrogate, or a repeated name in an
            object.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    _check_size(text, most_depth, most_values)
    try:
        value = json.loads(
            text, parse_constant=_refused, parse_float=_float, parse_int=_int, object_pairs_hook=_each_once
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:  # the caller itself is deep in the stack
        raise ValueError("the JSON text is nested too deep to be read here") from None
    except UnicodeEncodeError as error:
        before = error.object[max(0, error.start - _SHOWN_LETTERS) : error.start]
        raise ValueError(f"half a character (a lone surrogate) comes after {before!r}; expected a whole one") from None
    return value


def to_json(value: Any) -> str:
    """Return a JSON text that ``parse_json`` accepts; numbers that are not finite become null, lone surrogates ``?``.

    Raises:
        TypeError: the value, or a part of it, has no JSON form.
        ValueError: the value is nested too deep, is too large, or contains itself.
    """
    try:
        text = json.dumps(value)
        plain = json.loads(text, parse_constant=lambda _: None, parse_float=_finite, parse_int=_rounded)
        text = json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MOST_DEPTH}") from None
    parse_json(text)
    return text


def plain(text: str) -> str:
    """Return a job's message as one line of bounded length, with printable characters only."""
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: 4 * _MOST_LETTERS]).split())
    return words if len(words) <= _MOST_LETTERS else f"{words[:_MOST_LETTERS]}..."


def _check_size(text: str, most_depth: int, most_values: int) -> None:
    """Raise ValueError for a text that is nested too deep or has too many values, before anything is built."""
    if sum(map(text.count, ",[{")) > most_values:
        raise ValueError(f"the JSON text may have more than {most_values} values; expected fewer")
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub("", _ESCAPED.sub("", text))):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > most_depth:
            raise ValueError(f"the JSON text is nested deeper than {most_depth}")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice[:40]!r} is there twice in one object; expected it once")
    return found


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _float(digits: str) -> float:
    value = _finite(digits)
    if value is None:
        raise ValueError(f"{digits[:40]} is larger than any number that can be kept")
    return value


def _int(digits: str) -> int:
    value = _rounded(digits)
    if not isinstance(value, int):
        raise ValueError(f"{digits[:40]} is a whole number of more than 64 bits; expected -2**63 to 2**63 - 1")
    return value


def _finite(digits: str) -> float | None:
    return value if isfinite(value := float(digits)) else None


def _rounded(digits: str) -> int | float | None:
    fits = len(digits.lstrip("-")) <= _MOST_DIGITS and -(2**63) <= int(digits) < 2**63
    return int(digits) if fits else _finite(digits)
