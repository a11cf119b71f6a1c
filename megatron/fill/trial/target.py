"""Targets of a trial, from the command line: jobs of a jobs file, or one class with its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.fill.errors import ConfigError
from megatron.fill.given.jobs import JobSpec, distinct, load_jobs
from megatron.fill.given.plainyaml import PlainYamlError, parse_yaml
from megatron.fill.given.problems import expectation, shown

_SHOWN = 10  # names, in a message


def jobs_of(path: Path, names: Sequence[str]) -> list[JobSpec]:
    """Return the first job of each kind in a jobs file, or the jobs with these names; ConfigError if one is not there.

    Of a job with a ``count`` it is the first instance.
    """
    jobs = load_jobs(path)
    if not names:
        return distinct(jobs)
    by_name = {job.name: job for job in jobs}
    chosen = []
    for name in names:
        job = by_name.get(name) or by_name.get(f"{name}-0")
        if job is None:
            known = ", ".join([*list(by_name)[:_SHOWN], *["..."] * (len(by_name) > _SHOWN)])
            raise ConfigError(f"--job is {name!r}: expected one of {path}: {known}")
        chosen.append(job)
    return chosen


def job_of(target: str, arguments: Sequence[str], memory: str | None) -> tuple[JobSpec, Path]:
    """Return the job for ``module:Class`` or ``path.py:Class``, and the folder to import it from.

    Args:
        arguments: texts ``NAME=VALUE``, with the value written as in a jobs file.

    Raises:
        ConfigError: the target is neither, there is no such file, or an argument or the memory is invalid.
    """
    module, _, name = target.rpartition(":")
    folder = Path.cwd()
    if module.endswith(".py"):
        path = Path(module)
        if not path.is_file():
            raise ConfigError(f"{module}: there is no such file; expected a jobs file, module:Class or path.py:Class")
        if not path.stem.isidentifier():
            raise ConfigError(f"{module}: cannot be imported by that name; expected letters, digits and '_' only")
        folder, module = path.resolve().parent, path.stem
    values = dict(_argument(text) for text in arguments)
    try:
        job = JobSpec(
            name=re.sub(r"[^A-Za-z0-9]", "", name).lower()[:80] or "task",
            task=f"{module}:{name}",
            args=values,
            memory=memory,  # type: ignore[arg-type]  # read as in a jobs file
        )
    except ValidationError as error:
        problem = error.errors()[0]
        field = str(problem["loc"][0]) if problem["loc"] else "it"
        if field == "task":
            raise ConfigError(f"{target!r}: expected a jobs file, module:Class or path.py:Class") from None
        raise ConfigError(f"--{field} is {shown(problem['input'])}: {expectation(problem)}") from None
    return job, folder


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"argument {shown(text)}: expected NAME=VALUE")
    try:
        return name, parse_yaml(value).value
    except PlainYamlError as error:
        raise ConfigError(f"argument {shown(text)}: the value {error}") from None
