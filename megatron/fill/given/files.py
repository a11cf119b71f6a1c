"""Readers of users' files, of bounded size; errors name the file and what was expected."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

from megatron.fill import untrusted
from megatron.fill.errors import ConfigError
from megatron.fill.given.plainyaml import PlainYaml, PlainYamlError, parse_yaml

_MOST_BYTES = 256 << 20
_MOST_YAML_BYTES = 32 << 20
_MOST_JSON_VALUES = 30_000_000  # a report has some hundred per rank
_MOST_JSON_DEPTH = 64
_WRITER_S = 2.0  # for whoever writes into a pipe to open it


def read_text(path: str | Path, expected: str, most_bytes: int = _MOST_BYTES) -> str:
    """Return the file's text.

    ConfigError, with a description of a valid file (``expected``, such as ``a report.json``), if it cannot be read, is
    larger than ``most_bytes``, is not UTF-8, or is a pipe that nobody writes into.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            data = _first_byte(file.fileno())
            data += file.read(most_bytes + 1 - len(data))
        if len(data) > most_bytes:
            raise ConfigError(f"{path}: is larger than {most_bytes >> 20} MiB; expected {expected}")
        return data.decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError:
        reason = "is not UTF-8 text"
    except ValueError as error:  # a name that no file can have
        reason = str(error)
    raise ConfigError(f"{path}: cannot be read: {reason}; expected {expected}")


def _first_byte(fd: int) -> bytes:
    """Let a file block from now on; of a pipe, return the first byte if it is there, once the pipe has a writer."""
    first, end_s = b"", time.monotonic() + _WRITER_S
    try:
        while stat.S_ISFIFO(os.fstat(fd).st_mode) and not (first := os.read(fd, 1)):  # at its end: without a writer
            if time.monotonic() > end_s:
                raise TimeoutError("it is a pipe, and nobody writes into it")
            time.sleep(0.01)
    except BlockingIOError:
        pass  # it has a writer
    os.set_blocking(fd, True)
    return first


def read_yaml(path: str | Path, expected: str) -> PlainYaml:
    """Return the values of a YAML file with their lines; ConfigError, with the line, if it is wrong."""
    text = read_text(path, expected, _MOST_YAML_BYTES)
    try:
        return parse_yaml(text)
    except PlainYamlError as error:
        where = path if error.line is None else f"{path}, line {error.line}"
        raise ConfigError(f"{where}: {error}") from error


def read_json(path: str | Path, expected: str) -> Any:
    """Return the value of a JSON file; ConfigError if it cannot be read, or is no JSON (``untrusted.parse_json``)."""
    text = read_text(path, expected)
    try:
        return untrusted.parse_json(text, _MOST_JSON_DEPTH, _MOST_JSON_VALUES)
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}; expected {expected}") from error
