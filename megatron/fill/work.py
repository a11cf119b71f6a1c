"""What a job does: one value from the jobs file through the store to the worker."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """What to run, and what it may have.

    Attributes:
        task: ``module:Class``; None for a command.
        command: a program and its arguments; None for a task.
        args: of the task's ``create``.
        memory_bytes: its cap; None for what is free.
        env: variables for its environment.
        search: folders that the task is imported from, besides the installed packages.
        array: which instance it is of a job with a count, from 0, and of how many; None of a job without.
        timeout_s: how long one attempt may take; None for no limit.
        retries: how often it is tried again once it has failed.
        after: the names of jobs that must have succeeded before it begins.
        side_throughput: its work per second on a cheaper device, for the report only.
    """

    task: str | None = None
    command: tuple[str, ...] | None = None
    args: dict[str, Any] = field(default_factory=dict)
    memory_bytes: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    search: tuple[str, ...] = ()
    array: tuple[int, int] | None = None
    timeout_s: float | None = None
    retries: int = 0
    after: tuple[str, ...] = ()
    side_throughput: float | None = None

    @property
    def what(self) -> str:
        """``module:Class``, or the command line."""
        return self.task or shlex.join(self.command or ())

    def profile_key(self, device: str) -> str:
        """What its profiles are kept under: the same work with the same cap on the same kind of device.

        Args:
            device: its fingerprint, versions included: a profile that is stale or foreign is just not found.
        """
        what = [self.task or self.command, self.args, self.memory_bytes, device]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

    def identity(self) -> str:
        """What makes it the work that it is, as text: NaN is not equal to itself.

        Where a task is imported from depends on where one stands; which instance it is (of how many by now) its name
        says; and what its work would take elsewhere is only for the report.
        """
        return json.dumps(replace(self, search=(), array=None, side_throughput=None).to_dict(), sort_keys=True)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Work:
        """Read it back; what an older version has not written has its default."""
        values = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        for name in ("command", "search", "array", "after"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return cls(**values)
