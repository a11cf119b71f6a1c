"""The conversion of a jobs file's job into a job of the store."""

from __future__ import annotations

import getpass
import os

from megatron.fill.given.jobs import JobSpec
from megatron.fill.store.port import NewJob
from megatron.fill.work import Work


def submitter() -> str:
    """The name of the calling user, or the user ID in a container without names."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def new_job(spec: JobSpec, search: list[str], user: str) -> NewJob:
    """Convert a job of a jobs file into a job for ``JobStore.submit``.

    Args:
        spec: job of the jobs file.
        search: absolute folders from which the task is imported, in addition to the installed packages.
        user: submitting user, to whom the job belongs unless ``spec`` names another.
    """
    return NewJob(
        name=spec.name,
        work=Work(
            task=spec.task,
            command=spec.command,
            args=spec.args,
            memory_bytes=spec.memory,
            env=spec.env,
            search=tuple(search),
            array=spec.array,
            timeout_s=spec.timeout,
            retries=spec.retries,
            after=spec.after,
            side_throughput=spec.side_throughput,
        ),
        user=spec.user or user,
        priority=spec.priority,
        deadline_s=spec.deadline,
    )
