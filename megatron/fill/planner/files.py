"""The file of profiles that ``pipefill profile --output`` writes."""

from __future__ import annotations

from pathlib import Path

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_json
from megatron.fill.profiles import JobProfile


def load_profiles(path: str | Path) -> dict[str, list[JobProfile]]:
    """Read the profiles of each job, by name, from a file that ``pipefill profile --output`` wrote.

    Raises:
        ConfigError: the file is invalid; the message names the file, the job, and what was expected.
    """
    data = read_json(path, "a list of profiles per job name")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: found a {type(data).__name__}; expected a list of profiles per job name")
    found = {}
    for name, entries in data.items():
        try:
            found[name] = [JobProfile.from_dict(entry) for entry in entries]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: job {name!r}: {error}; expected a list of profiles per job name") from error
    return found
