"""Files that users give: read whole, with errors that name the file and what was expected."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.fill.errors import ConfigError
from megatron.fill.profiles import JobProfile


def read_text(path: str | Path, expected: str) -> str:
    """The file's text.

    Args:
        expected: what it should be, such as ``a report.json``.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}; expected {expected}") from error


def load_profiles(path: str | Path) -> dict[str, list[JobProfile]]:
    """The profiles of each job, from a file that ``pipefill profile --output`` wrote.

    Raises:
        ConfigError: naming the file, the job, and what was expected.
    """
    text = read_text(path, "a list of profiles per job name")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}; expected a list of profiles per job name") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: found a {type(data).__name__}; expected a list of profiles per job name")
    found = {}
    for name, entries in data.items():
        try:
            found[name] = [JobProfile.from_dict(entry) for entry in entries]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: job {name!r}: {error}; expected a list of profiles per job name") from error
    return found
