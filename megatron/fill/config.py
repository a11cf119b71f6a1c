"""``jobs.yaml`` and the ``--fill-*`` settings: checked before training starts, with errors that say where.

A jobs file::

    version: 1             # of this format; may be left out
    jobs:
      - name: digits
        task: megatron.fill.sidetask.digits:DigitsTraining   # module:Class, or instead of it:
        # command: gzip -k --best corpus.txt                 # any command line (a string or a list)
        args: {batch_size: 64}
        memory: 2GiB
        env: {MODE: fast}  # for its environment, of which it gets little else
        priority: 0        # higher first
        user: ada          # whom fair sharing counts it for (default: who submits it)
        deadline: 2h       # from now, or a point in time such as 2030-01-31T18:00
        count: 1           # how many instances
"""

from __future__ import annotations

import json
import re
import shlex
import time
from argparse import Namespace
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from megatron.fill.errors import ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: object) -> int:
    """``2GiB``, ``512 MB`` or a plain number of bytes.

    Raises:
        ValueError: it is none of these, or not above zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    if match is None or unit is None or isinstance(value, bool) or float(match[1]) * unit < 1:
        raise ValueError("expected a size above 0 such as 512MB or 2GiB")
    return int(float(match[1]) * unit)


def parse_deadline(value: object) -> float:
    """``90s``, ``30m``, ``2h`` or ``1d`` from now, or a point in time (ISO 8601, local without a zone).

    Returns:
        Seconds since the epoch.

    Raises:
        ValueError: it is neither.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", str(value))
    if match is not None:
        return time.time() + float(match[1]) * _SECONDS[match[2]]
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        raise ValueError("expected such as 90s, 30m, 2h, 1d, or 2030-01-31T18:00") from None


def _split_command(value: object) -> object:
    return shlex.split(value) if isinstance(value, str) else value


_MOST_VALUES, _MOST_DEPTH, _MOST_SHOWN = 1_000_000, 32, 300  # of a jobs file


class JobSpec(BaseModel):
    """One job of a jobs file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    task: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    command: Annotated[tuple[str, ...], BeforeValidator(_split_command)] | None = Field(default=None, min_length=1)
    args: dict[str, Any] = {}
    memory: Annotated[int, BeforeValidator(parse_bytes)] | None = None
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = {}
    priority: int = 0
    user: str = ""
    deadline: Annotated[float, BeforeValidator(parse_deadline)] | None = None
    count: int = Field(default=1, ge=1, le=10_000)

    @model_validator(mode="after")
    def _one_kind_of_work(self) -> JobSpec:
        if (self.task is None) == (self.command is None):
            raise ValueError("expected exactly one of task and command")
        if self.command is not None and self.args:
            raise ValueError("args belong to a task; write a command's arguments into command")
        return self

    @field_validator("args")
    @classmethod
    def _args_are_plain(cls, args: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(args, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"expected numbers, strings, booleans, null, lists and mappings: {error}") from None
        return args

    @property
    def what(self) -> str:
        """``module:Class`` or the command line."""
        return self.task or shlex.join(self.command or ())


class JobsFile(BaseModel):
    """A whole jobs file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    jobs: tuple[JobSpec, ...]
    version: Literal[1] = 1

    @field_validator("jobs")
    @classmethod
    def _names_are_unique(cls, jobs: tuple[JobSpec, ...]) -> tuple[JobSpec, ...]:
        for name, times in Counter(instance.name for instance in expand(jobs)).items():
            if times > 1:
                raise ValueError(f"two jobs are named {name!r}; expected different names")
        return jobs


def expand(jobs: tuple[JobSpec, ...]) -> list[JobSpec]:
    """One spec per instance: a job with ``count: 3`` becomes name-0, name-1 and name-2."""
    return [
        job if job.count == 1 else job.model_copy(update={"name": f"{job.name}-{i}", "count": 1})
        for job in jobs
        for i in range(job.count)
    ]


def load_jobs(path: str | Path) -> list[JobSpec]:
    """Read a jobs file; jobs with a count are expanded.

    Raises:
        ConfigError: naming the file, the job, the field, the value, and what was expected.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}; expected a YAML file with a list of jobs") from error
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # the latter for what only looks like a date, or a number
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())[:_MOST_SHOWN]}") from error
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep; expected at most {_MOST_DEPTH} levels") from None
    _check_size(path, data)
    if not isinstance(data, dict) or not isinstance(data.get("jobs"), list):
        raise ConfigError(f"{path}: found {_shown(data)}; expected a mapping with a list under 'jobs'")
    if not data["jobs"]:
        raise ConfigError(f"{path}: jobs is []; expected at least one job")
    try:
        return expand(JobsFile.model_validate(data).jobs)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(path, data, problem) for problem in error.errors())) from error


def _check_size(path: str | Path, data: object) -> None:
    """Refuse what a few lines of aliases can grow to, before anything walks through all of it."""
    count, level = 0, [data]
    for _ in range(_MOST_DEPTH):
        below: list[object] = []
        for value in level:
            inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            if isinstance(inside, list | tuple | set):
                count += len(inside)
                if count > _MOST_VALUES:
                    raise ConfigError(f"{path}: has more than {_MOST_VALUES} values, its aliases followed")
                below += inside
        level = below
    if level:
        raise ConfigError(f"{path}: is nested deeper than {_MOST_DEPTH} levels")


def _explain(path: str | Path, data: dict[str, Any], problem: Any) -> str:
    location = list(problem["loc"])
    where = str(path)
    if location[:1] == ["jobs"] and len(location) > 1 and isinstance(location[1], int):
        position = location[1]
        entry = data["jobs"][position]
        name = entry.get("name") if isinstance(entry, dict) else None
        where += f": job {name!r}" if isinstance(name, str) else f": job {position + 1}"
        location = location[2:]
    field = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        fields = JobSpec.model_fields if len(problem["loc"]) > 1 else JobsFile.model_fields
        return f"{where}: unknown field {field!r}; expected one of {', '.join(fields)}"
    if problem["type"] == "missing":
        return f"{where}: field {field!r} is missing"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if problem["type"] == "string_pattern_mismatch":
        message = {
            "name": "expected letters, digits, '.', '_' and '-', beginning with a letter or digit",
            "task": "expected module:Class",
        }.get(field, message)
    if not field:
        return f"{where}: {message}"
    return f"{where}: {field} is {_shown(problem['input'])}: {message}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class FillSettings(BaseModel):
    """The ``--fill-*`` flags of a run, in the units of the flags."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    jobs: tuple[JobSpec, ...] = ()
    store: str | None = None
    policy: str = "priority"
    report: str | None = None
    resubmit: bool = False
    profile_only: bool = False
    pipeline_schedule: Literal["megatron", "gpipe"] = "megatron"
    paired_blocks: int = Field(default=0, ge=0)
    warmup_iterations: int = Field(default=5, ge=1)
    guard_us: float = Field(default=0.0, ge=0)
    reach: bool = False
    min_bubble_us: float = Field(default=1000.0, ge=0)
    grace_ms: float = Field(default=500.0, gt=0)
    max_overruns: int = Field(default=3, ge=1)
    max_output_mib: float = Field(default=64.0, gt=0)
    checkpoint_seconds: float = Field(default=300.0, gt=0)
    lease_seconds: float = Field(default=30.0, ge=1)
    offload_optimizer: bool = False
    max_slowdown: float = Field(default=1.0, ge=0)
    memory_margin_mib: float = Field(default=1024.0, ge=0)
    sharing: Literal["auto", "mps", "timeslice"] = "auto"
    mps_pipe: str | None = None
    sm_percentage: int = Field(default=100, ge=1, le=100)
    user: str | None = None
    allow: tuple[str, ...] = ()
    bind: tuple[str, ...] = ()
    network: bool = False
    strict: bool = False
    max_processes: int = Field(default=256, ge=8)
    max_files: int = Field(default=1024, ge=64)
    baseline_seconds: float = Field(default=0.0, ge=0)
    trace_iterations: int = Field(default=3, ge=1)

    @property
    def active(self) -> bool:
        """Whether anything is asked of PipeFill beyond the schedule."""
        return self.serves or self.profile_only or self.report is not None

    @property
    def serves(self) -> bool:
        """Whether jobs may come: from a jobs file, or through a store that others submit to."""
        return bool(self.jobs) or self.store is not None

    @classmethod
    def from_args(cls, args: Namespace) -> FillSettings:
        """Read the flags that Megatron's parser has parsed.

        Raises:
            ConfigError: a flag or the jobs file has a wrong value.
        """
        values = {name: getattr(args, f"fill_{name}") for name in cls.model_fields}
        path = values.pop("jobs")
        if values["profile_only"] and path is not None:
            raise ConfigError("--fill-profile-only measures the bubbles without jobs; expected no --fill-jobs with it")
        if values["profile_only"] and values["store"] is not None:
            raise ConfigError("--fill-profile-only measures the bubbles without jobs; expected no --fill-store with it")
        try:
            return cls(jobs=tuple(load_jobs(path)) if path is not None else (), **values)
        except ValidationError as error:
            problem = error.errors()[0]
            flag = "--fill-" + str(problem["loc"][0]).replace("_", "-")
            raise ConfigError(f"{flag} is {_shown(problem['input'])}: {problem['msg'].lower()}") from error
