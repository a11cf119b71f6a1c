"""Jobs files, checked before anything starts; errors name the line (docs/jobs.md has the format)."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_yaml
from megatron.fill.given.problems import Place, explain, shown
from megatron.fill.given.quantities import parse_bytes, parse_deadline, parse_timeout
from megatron.fill.work import NewJob, Work

_MOST_OF_ONE, _MOST_JOBS = 10_000, 100_000  # instances of one entry, and of all entries of a file
_MOST_WAITS = 1_000_000  # pairs of a job and one that it waits for, in a file
_MOST_RETRIES = 1000
_MOST_RATE = 1e18  # units of work per second
_MOST_NUMBER = 2**63 - 1  # the largest integer of a database
_OURS = "PIPEFILL_"


def matching(pattern: str, expected: str) -> AfterValidator:
    """Return a validator of text that matches the pattern as a whole."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.DOTALL):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(check)


def _split_command(value: object) -> object:
    if isinstance(value, str):
        return shlex.split(value)
    if not isinstance(value, list | tuple):
        raise ValueError("expected a command line, in quotes if it looks like a number or a switch, or a list of words")
    return value


def _list(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _not_ours(name: str) -> str:
    if name.startswith(_OURS):
        raise ValueError(f"expected another name: those with {_OURS} are set for each job")
    return name


_Text = Annotated[str, matching(r"[^\0]*", "text without NUL characters")]
_Name = Annotated[
    str,
    matching(
        "[A-Za-z0-9][A-Za-z0-9._-]{0,79}", "1 to 80 letters, digits, '.', '_' and '-', beginning with a letter or digit"
    ),
]
_Variable = Annotated[
    str,
    matching("[A-Za-z_][A-Za-z0-9_]*", "letters, digits and '_', beginning with no digit"),
    AfterValidator(_not_ours),
]


class JobSpec(BaseModel):
    """A job of a jobs file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: _Name
    task: Annotated[str, matching(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "module:Class")] | None = None
    command: Annotated[tuple[_Text, ...], BeforeValidator(_split_command)] | None = None
    args: dict[str, Any] = {}
    memory: Annotated[int, BeforeValidator(parse_bytes)] | None = None
    env: dict[_Variable, _Text] = {}
    priority: int = Field(default=0, strict=True, ge=-_MOST_NUMBER, le=_MOST_NUMBER)
    user: _Text = ""
    deadline: Annotated[float, BeforeValidator(parse_deadline)] | None = None
    timeout: Annotated[float, BeforeValidator(parse_timeout)] | None = None
    retries: int = Field(default=0, strict=True, ge=0, le=_MOST_RETRIES)
    after: Annotated[tuple[_Name, ...], BeforeValidator(_list)] = ()
    count: int = Field(default=1, strict=True, ge=1, le=_MOST_OF_ONE)
    side_throughput: float | None = Field(default=None, strict=True, gt=0, le=_MOST_RATE, allow_inf_nan=False)
    _array: tuple[int, int] | None = PrivateAttr(default=None)  # ``Work.array``; no field of a file: ``expand`` sets it

    @model_validator(mode="after")
    def _can_begin(self) -> JobSpec:
        if (self.task is None) == (self.command is None):
            raise ValueError("expected exactly one of task and command")
        if self.command is not None and self.args:
            raise ValueError("args belong to a task; write a command's arguments into command")
        if self.name in self.after:  # checked here too, for jobs that a program submits without a file
            raise ValueError(f"none of these could ever begin: {self.name} after {self.name}")
        return self

    @field_validator("command")
    @classmethod
    def _names_a_program(cls, command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if command is not None and not (command and command[0]):
            raise ValueError("expected a program, and perhaps its arguments")
        return command

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

    @property
    def kind(self) -> str:
        """A text that is equal for jobs that differ only in name and queueing, such as those of a ``count``."""
        queueing = {"name", "user", "priority", "deadline", "retries", "after", "count", "side_throughput"}
        return self.model_dump_json(exclude=queueing)

    def to_submit(self, search: Sequence[str], user: str) -> NewJob:
        """Return the job for ``JobStore.submit``, of the submitting ``user`` unless the file names another.

        The task is also imported from the absolute folders in ``search``.
        """
        work = Work(
            task=self.task,
            command=self.command,
            args=self.args,
            memory_bytes=self.memory,
            env=self.env,
            search=tuple(search),
            array=self._array,
            timeout_s=self.timeout,
            retries=self.retries,
            after=self.after,
            side_throughput=self.side_throughput,
        )
        return NewJob(self.name, work, self.user or user, self.priority, self.deadline)


class JobsFile(BaseModel):
    """A whole jobs file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    jobs: tuple[JobSpec, ...]
    version: Literal[1] = 1

    @field_validator("jobs")
    @classmethod
    def _can_be_told_apart(cls, jobs: tuple[JobSpec, ...]) -> tuple[JobSpec, ...]:
        if (found := sum(job.count for job in jobs)) > _MOST_JOBS:
            raise ValueError(f"there are {found} jobs, all instances counted; expected at most {_MOST_JOBS} in a file")
        places: dict[str, int] = {}
        for place, job in enumerate(jobs, 1):
            for name in _names(job):
                if (other := places.setdefault(name, place)) != place:
                    raise ValueError(f"jobs {other} and {place} are both named {name!r}; expected different names")
        return jobs

    @field_validator("jobs")
    @classmethod
    def _can_all_begin(cls, jobs: tuple[JobSpec, ...]) -> tuple[JobSpec, ...]:
        counts = {job.name: job.count for job in jobs}
        if (found := sum(job.count * counts.get(name, 1) for job in jobs for name in job.after)) > _MOST_WAITS:
            raise ValueError(f"its jobs wait for others {found} times; expected at most {_MOST_WAITS} times")
        entries = {name: job.name for job in jobs for name in (job.name, *_names(job))}
        before = {job.name: {entries[name] for name in job.after if name in entries} for job in jobs}
        try:
            TopologicalSorter(before).prepare()
        except CycleError as error:
            ring = " after ".join(reversed(error.args[1]))
            raise ValueError(f"none of these could ever begin: {ring}") from None
        return jobs


def _names(job: JobSpec) -> tuple[str, ...]:
    """Return the name of each instance."""
    return (job.name,) if job.count == 1 else tuple(f"{job.name}-{i}" for i in range(job.count))


def expand(jobs: Sequence[JobSpec]) -> list[JobSpec]:
    """Return a spec for each instance: a job with ``count: 3`` becomes name-0, name-1 and name-2.

    A job with such a job in ``after`` waits for all its instances.
    """
    found = []
    instances = {job.name: _names(job) for job in jobs}
    for job in jobs:
        after = tuple(dict.fromkeys(name for first in job.after for name in instances.get(first, (first,))))
        for index, name in enumerate(instances[job.name]):
            one = job.model_copy(update={"name": name, "count": 1, "after": after})
            one._array = (index, job.count) if job.count > 1 else None
            found.append(one)
    return found


def distinct(jobs: Sequence[JobSpec]) -> list[JobSpec]:
    """Return the first job of each kind."""
    first: dict[str, JobSpec] = {}
    for job in jobs:
        first.setdefault(job.kind, job)
    return list(first.values())


def load_jobs(path: str | Path) -> list[JobSpec]:
    """Read a jobs file, and expand jobs with a count; ConfigError, with the file and the line, if it is invalid."""
    read = read_yaml(path, "a YAML file with a list of jobs")
    data = read.value
    if not isinstance(data, dict) or not isinstance(data.get("jobs"), list):
        raise ConfigError(f"{path}: found {shown(data)}; expected a mapping with a list under 'jobs'")
    if not data["jobs"]:
        raise ConfigError(f"{path}: jobs is []; expected at least one job")

    def where(place: Place) -> tuple[str, Place]:
        begin = read.placed(path, place)
        if len(place) < 2 or not isinstance(place[1], int):
            return begin, place
        entry = data["jobs"][place[1]]
        name = entry.get("name") if isinstance(entry, dict) else None
        return f"{begin}: job {shown(name) if isinstance(name, str) else place[1] + 1}", place[2:]

    try:
        return expand(JobsFile.model_validate(data).jobs)
    except ValidationError as error:
        raise ConfigError(explain(error, JobsFile, where)) from error


def submitter() -> str:
    """The name of the calling user, or the user ID in a container without names."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
