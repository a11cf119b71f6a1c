"""A job to submit, and its work: one value, passed from the jobs file through the store to the worker."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """The task or command of a job, and its limits."""

    task: str | None = None  # ``module:Class``; None for a command
    command: tuple[str, ...] | None = None  # a program and its arguments; None for a task
    args: dict[str, Any] = field(default_factory=dict)  # arguments of the task's ``create``
    memory_bytes: int | None = None  # its device memory limit; None for all that is free
    env: dict[str, str] = field(default_factory=dict)
    search: tuple[str, ...] = ()  # folders that the task is imported from, in addition to the installed packages
    # Its index (from 0) and the number of instances of a job with a count; None without a count.
    array: tuple[int, int] | None = None
    timeout_s: float | None = None  # time limit of one attempt; None for no limit
    retries: int = 0  # number of further attempts after a failure
    after: tuple[str, ...] = ()  # names of jobs that must have succeeded before it begins
    side_throughput: float | None = None  # its work per second on a cheaper device, for the report only

    @property
    def instance(self) -> tuple[int, int]:
        """Its index and the number of instances; 0 and 1 without a count."""
        return self.array or (0, 1)

    @property
    def what(self) -> str:
        """``module:Class``, or the command line."""
        return self.task or shlex.join(self.command or ())

    def profile_key(self, device: str) -> str:
        """Return the store's key of its profiles; ``device`` is a fingerprint, so that no stale profile is found."""
        what = [self.task or self.command, self.args, self.memory_bytes, device]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def identity(self) -> str:
        """Return a JSON text that is equal for equal work (a text, since NaN != NaN).

        Left out are ``search``, which depends on the working directory, ``array``, which is part of the job's name, and
        ``side_throughput``, which is for the report only.
        """
        return json.dumps(asdict(replace(self, search=(), array=None, side_throughput=None)), sort_keys=True)


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to submit."""

    name: str  # name unique among the unfinished jobs of a store
    work: Work
    user: str = ""  # user to whom fair sharing attributes it
    priority: int = 0  # greater is more urgent
    deadline_s: float | None = None  # time by which it should be done; None for no deadline
